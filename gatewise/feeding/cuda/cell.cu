// The element-wise operations between the matrix products of a decoder step with input feeding: the cell, and the sum of
// context and hidden state. Every plane is row-major, with one row per sentence; rows may be parts of wider rows.
#include "cell.cuh"
#include "operand.cuh"

static_assert(SUMS == 4 && GATES == 4 && !CARRIES_HIDDEN, "a cell with four gates and a cell state");

constexpr int THREADS = 128;

struct Place {
    i64 row, unit;
    bool there;
};

__device__ __forceinline__ Place place(int batch, int units) {
    const int across = units / WIDTH, index = (int)(blockIdx.x * THREADS + threadIdx.x);
    return {index / across, (i64)(index % across) * WIDTH, index < batch * across};
}

struct Cell {
    Value* gates;          // the other summands [B, 4H]; overwritten by the activated gates
    const Value* product;  // the product, which is added [B, 4H]
    const Value* bias;     // the bias, which is added too [4H]; or null
    Real* cell;            // the cell state [B, H], updated in place
    Value* kept;           // copy of the cell state for the backward pass [B, H]; null if nothing is kept
    Operand* hidden;       // [B, H]
    Operand* above;        // the hidden state after dropout, for the layer above; or null
    const Flag* mask;      // the units that dropout keeps [B, H]; null for all
    i64 hidden_row, above_row;
    double scale;  // the factor of the units that dropout keeps
    int batch, units, sums;  // sums: whether `gates` contains summands
};

extern "C" __global__ void __launch_bounds__(THREADS) feeding_cell(const Cell a) {
    const Place at = place(a.batch, a.units);
    if (!at.there) return;
    const i64 plane = at.row * a.units + at.unit;
    Value* const gates = a.gates + at.row * 4 * a.units + at.unit;
    Values sums[4], bias[4], products[4];
    for (int gate = 0; gate < 4; gate++) {
        if (a.sums) sums[gate] = load(gates + gate * a.units);
        if (a.bias) bias[gate] = load(a.bias + gate * a.units + at.unit);
    }
    Reals cell = load_reals(a.cell + plane);
    Flags stays;
    if (a.mask) stays = load_flags(a.mask, plane);

    wait_for_preceding_kernel();
    for (int gate = 0; gate < 4; gate++) products[gate] = load(a.product + (at.row * 4 + gate) * a.units + at.unit);
    Operands hidden, above;
    Values kept;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        Real total[4];
#pragma unroll
        for (int gate = 0; gate < 4; gate++) {
            total[gate] = widened(products[gate].at[k]);
            if (a.sums) total[gate] += widened(sums[gate].at[k]);
            if (a.bias) total[gate] += widened(bias[gate].at[k]);
        }
        const Stepped next = stepped({total[0], total[1], total[2], total[3]}, cell.at[k]);
        cell.at[k] = next.state;
        hidden.at[k] = operand(next.hidden);
        above.at[k] = a.mask ? operand(stays.at[k] ? next.hidden * (Real)a.scale : Real(0)) : hidden.at[k];
        kept.at[k] = narrowed(cell.at[k]);
        sums[0].at[k] = narrowed(next.kept.x), sums[1].at[k] = narrowed(next.kept.y);
        sums[2].at[k] = narrowed(next.kept.z), sums[3].at[k] = narrowed(next.kept.w);
    }
    store_operands(a.hidden + at.row * a.hidden_row + at.unit, hidden);
    store_reals(a.cell + plane, cell);
    if (a.above) store_operands(a.above + at.row * a.above_row + at.unit, above);
    if (a.kept) {
        store(a.kept + plane, kept);
        for (int gate = 0; gate < 4; gate++) store(gates + gate * a.units, sums[gate]);
    }
}

struct Gates {
    Value* gates;  // the gate sums [batch, 4H]; overwritten by the activated gates
    int batch, units;
};

extern "C" __global__ void __launch_bounds__(THREADS) feeding_gates(const Gates a) {
    const Place at = place(a.batch, a.units);
    if (!at.there) return;
    wait_for_preceding_kernel();
    Value* const gates = a.gates + at.row * 4 * a.units + at.unit;
    Values sums[4];
#pragma unroll
    for (int gate = 0; gate < 4; gate++) sums[gate] = load(gates + gate * a.units);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        Real total[4];
#pragma unroll
        for (int gate = 0; gate < 4; gate++) total[gate] = widened(sums[gate].at[k]);
        const Kept kept = stepped({total[0], total[1], total[2], total[3]}, Real(0)).kept;
        sums[0].at[k] = narrowed(kept.x), sums[1].at[k] = narrowed(kept.y);
        sums[2].at[k] = narrowed(kept.z), sums[3].at[k] = narrowed(kept.w);
    }
#pragma unroll
    for (int gate = 0; gate < 4; gate++) store(gates + gate * a.units, sums[gate]);
}

__device__ __forceinline__ void add(const Planes& from, const Place& at, Real* to) {
    if (!from.planes) return;
    const Value* const first = from.planes + at.row * from.row + at.unit;
    const Real scale = from.scale ? from.scale[at.row] : Real(1);
    for (int part = 0; part < from.parts; part++) {
        const Values share = load(first + part * from.part);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) to[k] += widened(share.at[k]) * scale;
    }
}

struct CellGradient {
    Value* gates;          // the activated gates [B, 4H]; overwritten by the gradients of the gate sums, as operands
    const Value* cell;     // the cell state after the step [B, H]
    const Value* earlier;  // the cell state before the step
    Real* dcell;           // the gradient of the cell state after the step [B, H]; overwritten by that before the step
    Real* written;         // HALVES: the scale of each row of gradients [B]
    Planes above, beside, later;  // dh from the layer above, from attention, from the next step
    const Flag* mask;             // the dropout of the input of the layer above
    double scale;
    int batch, units;
};

#if HALVES
constexpr int LARGEST = 14;  // the exponent of a row's largest number after scaling; the range of float16 ends at 2^16

// Returns the power of two that scales a row's largest number to the exponent LARGEST. A block handles one row.
__device__ __forceinline__ int row_exponent(Real largest) {
    __shared__ Real of_warps[32];
    for (int lane = 16; lane; lane /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();  // this also guarantees that every thread has read its gates
    for (int warp = 0; warp < (blockDim.x + 31) / 32; warp++) largest = fmaxf(largest, of_warps[warp]);
    const int exponent = LARGEST + Float32::EXPONENT_BIAS - Float32::exponent_of(largest);
    return exponent < -100 || exponent > 100 ? exponent < 0 ? -100 : 100 : exponent;
}

__device__ __forceinline__ Real power_of_two(int exponent) { return Float32::power_of_two(exponent + Float32::EXPONENT_BIAS); }
#endif

extern "C" __global__ void feeding_cell_gradient(const CellGradient a) {
#if HALVES
    // There is one block per row; threads beyond the end of the row do nothing.
    const bool there = threadIdx.x * WIDTH < a.units;
    const Place at = {(i64)blockIdx.x, there ? (i64)threadIdx.x * WIDTH : 0, there};
#else
    const Place at = place(a.batch, a.units);
    if (!at.there) return;
#endif
    const i64 plane = at.row * a.units + at.unit;
    Value* const kept = a.gates + at.row * 4 * a.units;
    Values gates[4];
    for (int gate = 0; gate < 4; gate++) gates[gate] = load(kept + gate * a.units + at.unit);
    const Values after = load(a.cell + plane), before = load(a.earlier + plane);
    Reals dcell = load_reals(a.dcell + plane);
    Flags stays;
    if (a.mask) stays = load_flags(a.mask, plane);
    Real dh[WIDTH], found[4][WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; k++) dh[k] = 0;

    wait_for_preceding_kernel();
    add(a.above, at, dh);
    if (a.mask) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++) dh[k] = stays.at[k] ? dh[k] * (Real)a.scale : Real(0);
    }
    add(a.beside, at, dh);
    add(a.later, at, dh);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        Real own[4];
#pragma unroll
        for (int gate = 0; gate < 4; gate++) own[gate] = widened(gates[gate].at[k]);
        const Slopes slope = slopes({own[0], own[1], own[2], own[3]}, widened(after.at[k]), widened(before.at[k]));
        const Kept grad = adjoint(slope, dh[k], dcell.at[k]);
        found[0][k] = grad.x, found[1][k] = grad.y, found[2][k] = grad.z, found[3][k] = grad.w;
    }
    Operand* const written = (Operand*)kept;
    Real scale = 1;
#if HALVES
    Real largest = 0;
#pragma unroll
    for (int gate = 0; gate < 4; gate++)
        for (int k = 0; k < WIDTH; k++) largest = fmaxf(largest, fabsf(found[gate][k]));
    const int exponent = row_exponent(largest);
    if (!there) return;
    scale = power_of_two(exponent);
    if (threadIdx.x == 0) a.written[at.row] = power_of_two(-exponent);
#endif
    store_reals(a.dcell + plane, dcell);
#pragma unroll
    for (int gate = 0; gate < 4; gate++) {
        Operands gradients;
        for (int k = 0; k < WIDTH; k++) gradients.at[k] = operand(found[gate][k] * scale);
        store_operands(written + gate * a.units + at.unit, gradients);
    }
}

struct Attended {
    const Value* context;  // [B, H]
    const Value* state;    // the contribution of the hidden state [B, H]
    Value* output;         // [B, H]; or null
    Operand* fed;          // the output as an operand of the next step
    const Flag* mask;      // the units that dropout keeps; null for all
    i64 context_row, state_row, output_row, fed_row;
    double scale;
    int batch, units;
};

extern "C" __global__ void __launch_bounds__(THREADS) feeding_attended(const Attended a) {
    const Place at = place(a.batch, a.units);
    if (!at.there) return;
    const Values state = load(a.state + at.row * a.state_row + at.unit);
    Flags stays;
    if (a.mask) stays = load_flags(a.mask, at.row * a.units + at.unit);

    wait_for_preceding_kernel();
    Values found = load(a.context + at.row * a.context_row + at.unit);
    Operands fed;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        Real out = tanh_of(widened(found.at[k]) + widened(state.at[k]));
        if (a.mask) out = stays.at[k] ? out * (Real)a.scale : Real(0);
        found.at[k] = narrowed(out);
        fed.at[k] = operand(out);
    }
    if (a.output) store(a.output + at.row * a.output_row + at.unit, found);
    store_operands(a.fed + at.row * a.fed_row + at.unit, fed);
}

struct AttendedGradient {
    Value* sums;          // the gradient of context + state [B, H]
    const Value* output;  // the output of the forward pass
    const Value* dy;      // the gradient of the output from the loss; or null
    Planes later;         // the gradient of the output from the next step, which reads it
    const Flag* mask;
    i64 sums_row, output_row, dy_row;
    double scale;
    int batch, units;
};

extern "C" __global__ void __launch_bounds__(THREADS) feeding_attended_gradient(const AttendedGradient a) {
    const Place at = place(a.batch, a.units);
    if (!at.there) return;
    const Values output = load(a.output + at.row * a.output_row + at.unit);
    Values found;
    Flags stays;
    Real d[WIDTH];
    if (a.dy) found = load(a.dy + at.row * a.dy_row + at.unit);
    if (a.mask) stays = load_flags(a.mask, at.row * a.units + at.unit);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) d[k] = a.dy ? widened(found.at[k]) : Real(0);

    wait_for_preceding_kernel();
    add(a.later, at, d);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        // The tanh of a dropped unit is lost, but its gradient is zero anyway.
        Real squashed = widened(output.at[k]);
        if (a.mask) {
            squashed /= (Real)a.scale;
            d[k] = stays.at[k] ? d[k] * (Real)a.scale : Real(0);
        }
        found.at[k] = narrowed(d[k] * (Real(1) - squashed * squashed));
    }
    store(a.sums + at.row * a.sums_row + at.unit, found);
}

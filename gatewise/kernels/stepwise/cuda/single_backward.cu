// The backward pass of a single time step of a layer. For up to 8 sequences it is two launches; for more, `single_products` is
// not compiled, and products of the library take its place.
//
// `single_adjoint` computes the adjoint of the cell's step from the sums that the forward pass has kept (single.cu), element by
// element: the gradients of the sums, and of everything that the step reads besides the products.
//
// `single_products` computes the products of these gradients, all of which are independent of each other: those with the weights,
// which are the gradients of the input and of the hidden states, and those with the input and the hidden states, which are the
// gradients of the weights. A block computes a part of one of them. From compute capability 9.0 on, the launch starts while
// `single_adjoint` runs.
//
// `gate` is the number of a block of H rows of a weight matrix, and `sum` that of a sum of the cell. They differ where a gate
// has two sums, as in a GRU.
#include "launch.cuh"
#include "row_cell.cuh"
#include "shuffles.cuh"
#include "vectors.cuh"

constexpr int LANES = 32;
static_assert(STATISTICS == 0, "the step combines no units");
static_assert(PARAMETERS <= MOST_PARAMETERS, "the struct has as many pointers");

// The format of the gradients of weight matrices and biases.
#if WIDE
using Gradient = Real;
__device__ __forceinline__ Gradient as_gradient(Real value) { return value; }
#else
using Gradient = Value;
__device__ __forceinline__ Gradient as_gradient(Real value) { return narrowed(value); }
#endif

struct Adjoint {
    const Real* sums;                          // the sums of the step [B, SUMS * H]
    const Value* hidden;                       // the hidden states before the step [B, H]
    const Value* others;                       // the other states before the step [B, STATES * H]
    const Value* dy;                           // the gradient of the output [B, H], or null
    const Value* dhidden_after;                // the gradients of the states after the step, of the shapes above, or null
    const Value* dothers_after;
    Value* dsums;                              // the gradients of the sums [B, SUMS * H]
    Value* dothers;                            // the gradients of the other states before the step [B, STATES * H]
    // The part of the gradient of the hidden states before the step [B, H] that is in no product. `single_products` reads it from
    // `dhidden`, and products of the library are added to `dhidden_before`; the other pointer is null. Both are null if the step
    // reads the hidden states in products alone, or if the gradient is not wanted.
    Real* dhidden;
    Value* dhidden_before;
    Value* dproducts;                          // the gradients of the recurrent products of the gates [B, GATES * H], or null
    Gradient* dinput_bias;                     // the gradients of the biases [GATES * H], or null
    Gradient* drecurrent_bias;
    Value* dparameters;                        // the gradients of the parameters [PARAMETERS, H], or null
    const Value* parameters[MOST_PARAMETERS];  // of the cell [H]
    int batch, units;
};

struct Products {
    const Value* dsums;              // see above
    const Value* x;                  // the input [B, I]
    const Value* hidden;             // the hidden states before the step [B, H]
    const Value* input_weights;      // [GATES * H, I]
    const Value* recurrent_weights;  // [GATES * H, H]
    const Real* dhidden;             // see above; null if nothing is to be added
    Value* dx;                       // the gradient of the input [B, I]; null, as the next three, if it is not wanted
    Value* dhidden_before;           // the gradient of the hidden states before the step [B, H]
    Gradient* dinput_weights;        // the gradients of the weights
    Gradient* drecurrent_weights;
    int batch, inputs, units;
    // The numbers of blocks that compute dx, dhidden_before, dinput_weights and drecurrent_weights; 0 for what is not wanted.
    int blocks[4];
};

// A block computes LANES units; LANES_OF_UNIT threads share the sequences of a unit.
extern "C" __global__ void __launch_bounds__(LANES * LANES_OF_UNIT) single_adjoint(const Adjoint p) {
    constexpr int TOTALS = SUMS + PARAMETERS;
    __shared__ Real parts[LANES_OF_UNIT * (SUMS + PARAMETERS) * LANES];
    let_next_kernel_start();
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES, unit = blockIdx.x * LANES + lane;
    Real totals[TOTALS] = {};
    for (int b = first; unit < p.units && b < p.batch; b += LANES_OF_UNIT) {
        const int place = b * p.units + unit;
        Given given[1], found[1];
        Returned above[1];
        Real statistics[1][STATISTICS + 1];
        struct {
        } alone;
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) given[0].sums[sum] = p.sums[(b * SUMS + sum) * p.units + unit];
#pragma unroll
        for (int i = 0; i < CARRIED; i++)
            given[0].states[i] = widened(i < STATES ? p.others[(b * STATES + i) * p.units + unit] : p.hidden[place]);
#pragma unroll
        for (int i = 0; i < PARAMETERS; i++) given[0].parameters[i] = widened(p.parameters[i][unit]);
        above[0].hidden = p.dy ? widened(p.dy[place]) : Real(0);
        if (p.dhidden_after) above[0].hidden += widened(p.dhidden_after[place]);
#pragma unroll
        for (int i = 0; i < STATES; i++)
            above[0].states[i] = p.dothers_after ? widened(p.dothers_after[(b * STATES + i) * p.units + unit]) : Real(0);
        adjoint_of_row(given, above, found, statistics, alone);
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) {
            p.dsums[(b * SUMS + sum) * p.units + unit] = narrowed(found[0].sums[sum]);
            if (p.dproducts && recurrent_gate(sum) >= 0)
                p.dproducts[(b * GATES + recurrent_gate(sum)) * p.units + unit] = narrowed(found[0].sums[sum]);
            totals[sum] += found[0].sums[sum];
        }
#pragma unroll
        for (int i = 0; i < CARRIED; i++)
            if (i < STATES)
                p.dothers[(b * STATES + i) * p.units + unit] = narrowed(found[0].states[i]);
            else if (p.dhidden)
                p.dhidden[place] = found[0].states[i];
            else if (p.dhidden_before)
                p.dhidden_before[place] = narrowed(found[0].states[i]);
#pragma unroll
        for (int i = 0; i < PARAMETERS; i++) totals[SUMS + i] += found[0].parameters[i];
    }
    if (!p.dinput_bias && !p.dparameters) return;
#pragma unroll
    for (int i = 0; i < TOTALS; i++) parts[(first * TOTALS + i) * LANES + lane] = totals[i];
    __syncthreads();
    if (first > 0 || unit >= p.units) return;
#pragma unroll
    for (int i = 0; i < TOTALS; i++)
        for (int part = 1; part < LANES_OF_UNIT; part++) totals[i] += parts[(part * TOTALS + i) * LANES + lane];
    if (p.dinput_bias)
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) {
            if (input_gate(sum) >= 0) p.dinput_bias[input_gate(sum) * p.units + unit] = as_gradient(totals[sum]);
            if (recurrent_gate(sum) >= 0) p.drecurrent_bias[recurrent_gate(sum) * p.units + unit] = as_gradient(totals[sum]);
        }
    if (p.dparameters)
#pragma unroll
        for (int i = 0; i < PARAMETERS; i++) p.dparameters[i * p.units + unit] = narrowed(totals[SUMS + i]);
}

#if PRODUCTS
// The sum to which a row of a gate of the input weights or of the recurrent weights contributes.
template <bool RECURRENT>
__device__ __forceinline__ int sum_of(int gate) {
    int found = gate;
    if (RECURRENT)
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++)
            if (recurrent_gate(sum) == gate) found = sum;
    return found;
}

template <int SIZE>
struct alignas(SIZE * sizeof(Value)) Piece {
    Value at[SIZE];
};

template <int SIZE>
struct alignas(SIZE * sizeof(Gradient) > 16 ? 16 : SIZE * sizeof(Gradient)) Gradients {
    Gradient at[SIZE];
};

// Replaces numbers by sums over lanes whose indices differ in the bits from LEAST to DISTANCE. At each distance, the lanes of
// each half give away the numbers of the other half, as long as there are several. A lane is left with COUNT divided by the number
// of lanes that share the numbers, at least one; `first` is increased by the index of the first of them.
template <int DISTANCE, int LEAST, int COUNT>
__device__ __forceinline__ void add_up(Real* numbers, int& first) {
    if constexpr (DISTANCE >= LEAST) {
        constexpr int HALF = COUNT / 2;
        const bool upper = threadIdx.x & DISTANCE;
        if constexpr (HALF > 0) {
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const Real given = upper ? numbers[i] : numbers[i + HALF];
                numbers[i] = (upper ? numbers[i + HALF] : numbers[i]) + __shfl_xor_sync(EVERY_LANE, given, DISTANCE);
            }
            first += upper ? HALF : 0;
            add_up<DISTANCE / 2, LEAST, HALF>(numbers, first);
        } else {
            numbers[0] += __shfl_xor_sync(EVERY_LANE, numbers[0], DISTANCE);
            add_up<DISTANCE / 2, LEAST, COUNT>(numbers, first);
        }
    }
}

// Computes COLUMNS columns of the product of the gradients of the sums and a matrix [GATES * H, size]: each thread multiplies
// pieces of SIZE values of some rows. `added` is null, or has what is added to the product.
template <bool RECURRENT, int SIZE>
__device__ __forceinline__ void multiply_columns(
    const Products& p, const Value* matrix, int size, int block, const Real* added, Value* to, Real* shared) {
    constexpr int PIECES = COLUMNS / SIZE, COUNT = ROWS * SIZE, WARPS = THREADS / LANES;
    const int piece = threadIdx.x % PIECES, column = block * COLUMNS + piece * SIZE;
    Real numbers[COUNT] = {};
#pragma unroll 1
    for (int unit = threadIdx.x / PIECES; unit < p.units; unit += THREADS / PIECES) {
        if (column >= size) break;
        Piece<SIZE> own[GATES];  // those of all gates are on their way at once
#pragma unroll
        for (int gate = 0; gate < GATES; gate++)
            own[gate] = *(const Piece<SIZE>*)(matrix + ((i64)gate * p.units + unit) * size + column);
#pragma unroll
        for (int gate = 0; gate < GATES; gate++)
#pragma unroll
            for (int b = 0; b < ROWS; b++) {
                const int place = (b * SUMS + sum_of<RECURRENT>(gate)) * p.units + unit;
                const Real gradient = b < p.batch ? widened(p.dsums[place]) : Real(0);
#pragma unroll
                for (int i = 0; i < SIZE; i++) numbers[b * SIZE + i] += gradient * widened(own[gate].at[i]);
            }
    }
    constexpr int SHARES = LANES / PIECES, LEFT = COUNT > SHARES ? COUNT / SHARES : 1;
    int first = 0;
    add_up<LANES / 2, PIECES, COUNT>(numbers, first);
#pragma unroll
    for (int i = 0; i < LEFT; i++) shared[(threadIdx.x / LANES * PIECES + piece) * COUNT + first + i] = numbers[i];
    __syncthreads();
    for (int place = threadIdx.x; place < PIECES * COUNT; place += THREADS) {
        const int b = place % COUNT / SIZE, at = block * COLUMNS + place / COUNT * SIZE + place % SIZE;
        if (b >= p.batch || at >= size) continue;
        Real total = added ? added[(i64)b * size + at] : Real(0);
        for (int warp = 0; warp < WARPS; warp++) total += shared[warp * PIECES * COUNT + place];
        to[(i64)b * size + at] = narrowed(total);
    }
}

// Computes OUTER_ROWS rows of the product of the gradients of the sums and vectors [B, size], which is the gradient of a matrix
// [GATES * H, size].
template <bool RECURRENT, int SIZE>
__device__ __forceinline__ void multiply_outer(
    const Products& p, const Value* vectors, int size, int block, Gradient* to) {
    const int pieces = size / SIZE, lanes = min(pieces, THREADS), rows = THREADS / lanes;
    const int end = min((block + 1) * OUTER_ROWS, GATES * p.units);
    if (threadIdx.x >= lanes * rows) return;
    for (int piece = threadIdx.x % lanes; piece < pieces; piece += lanes) {
        Piece<SIZE> own[ROWS];
#pragma unroll
        for (int b = 0; b < ROWS; b++) own[b] = *(const Piece<SIZE>*)(vectors + (i64)min(b, p.batch - 1) * size + piece * SIZE);
#pragma unroll 1
        for (int row = block * OUTER_ROWS + threadIdx.x / lanes; row < end; row += rows) {
            const int gate = row / p.units, place = sum_of<RECURRENT>(gate) * p.units + row % p.units;
            Real totals[SIZE] = {};
#pragma unroll
            for (int b = 0; b < ROWS; b++)
                if (b < p.batch) {
                    const Real gradient = widened(p.dsums[b * SUMS * p.units + place]);
#pragma unroll
                    for (int i = 0; i < SIZE; i++) totals[i] += gradient * widened(own[b].at[i]);
                }
            Gradients<SIZE> found;
#pragma unroll
            for (int i = 0; i < SIZE; i++) found.at[i] = as_gradient(totals[i]);
            *(Gradients<SIZE>*)(to + (i64)row * size + piece * SIZE) = found;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) single_products(const Products p) {
    __shared__ Real shared[THREADS / LANES * COLUMNS * ROWS];
    wait_for_preceding_kernel();
    int block = blockIdx.x;
    if (block < p.blocks[0]) return multiply_columns<false, INPUT_WIDTH>(p, p.input_weights, p.inputs, block, nullptr, p.dx, shared);
    block -= p.blocks[0];
    if (block < p.blocks[1])
        return multiply_columns<true, WIDTH>(p, p.recurrent_weights, p.units, block, p.dhidden, p.dhidden_before, shared);
    block -= p.blocks[1];
    if (block < p.blocks[2]) return multiply_outer<false, INPUT_WIDTH>(p, p.x, p.inputs, block, p.dinput_weights);
    block -= p.blocks[2];
    multiply_outer<true, WIDTH>(p, p.hidden, p.units, block, p.drecurrent_weights);
}
#endif

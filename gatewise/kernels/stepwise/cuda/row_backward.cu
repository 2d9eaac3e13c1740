// The backward pass between two recurrent products, for cells that backward.cu does not support: the adjoint of one time step of
// the cell for a batch row in each block.
#include "recorded.cuh"
#include "row.cuh"

struct Backward {
    const Value* gates;    // the sums of all steps
    Value* written;        // the gradients of the sums of all steps, with the strides of `gates`; may be `gates`
    Value* dgates;         // the gradients of this step's recurrent sums, an operand of the next product
    const Real* cells;     // the carried states of all steps [D, T, B, CARRIED * H]
    const Value* c0;       // the initial carried states [D, B, CARRIED * H]
    const Value* dy;       // the gradient of the outputs, or null
    const Value* dh_n;     // the gradient of the final hidden state [D, B, H], or null
    const Value* product;  // the gradient of the hidden state through the step after this one, as partial sums
    Real* dcell;           // the gradients of the carried states [D, B, CARRIED * H]; overwritten
    const i64* lengths;    // the lengths of the sequences [B]; null if all are T
    i64 gates_direction, gates_time, gates_outer, gates_gate;
    i64 dgates_direction, dgates_outer, dgates_gate;
    i64 dy_direction, dy_time, dy_outer;
    i64 product_direction, product_part;
    int parts, whole, time, outer, inner, step;  // `parts` is the number of partial sums, and `whole` is 0
    const bool* resets;                          // the steps at which episodes begin [T, B], or null
    const Value* parameters;                     // the parameters of the cell [D, PARAMETERS, H]
    const Real* statistics;                      // the statistics of all steps [D, T, B, STATISTICS]
    Real* dparameters;                           // the gradients of the parameters for each row [D, B, PARAMETERS, H]
    const bool* masks;                           // the masks of steps [MASKS, T, B, D * H]
    const Real* factors;                         // the factors of the hidden state in the recurrent product [D, B, H], or null
    int directions;                              // D
};

#if TABLE
extern "C" __global__ void enter_row_backward(const Entered<Backward> a) { *a.table = a.arguments; }
extern "C" __global__ void advance_row_backward(const Recorded<Backward> a) { a.table->step += a.step; }

extern "C" __global__ void __launch_bounds__(THREADS) step_backward(const Recorded<Backward> recorded) {
    const Backward a = *recorded.table;
    const int step = a.step + recorded.step;
#else
extern "C" __global__ void __launch_bounds__(THREADS) step_backward(const Backward a) {
    const int step = a.step;
#endif
    const int b = blockIdx.x, direction = blockIdx.z;
    const Row row = {a.inner, Real(1) / a.inner};
    const RowStep at = row_step(a.lengths, a.resets, direction, b, a.outer, direction ? step : a.time - 1 - step, a.time);
    const i64 place_of_gates = direction * a.gates_direction + at.t * a.gates_time + b * a.gates_outer;
    const i64 plane = (i64)direction * a.outer + b;
    Value* const dgates = a.dgates + direction * a.dgates_direction + b * a.dgates_outer;
    if (!at.active) {
        for (int u = 0; u < UNITS; u++) {
            if (!row.exists(u)) continue;
            for (int sum = 0; sum < SUMS; sum++) {
                a.written[place_of_gates + sum * a.gates_gate + row.unit(u)] = narrowed(0);
                if (recurrent_gate(sum) >= 0) dgates[recurrent_gate(sum) * a.dgates_gate + row.unit(u)] = narrowed(0);
            }
        }
        return;
    }
    Real statistics[UNITS][STATISTICS + 1];  // the same for all units
#pragma unroll
    for (int i = 0; i < STATISTICS; i++) {
        const Real own = a.statistics[(((i64)direction * a.time + at.t) * a.outer + b) * STATISTICS + i];
#pragma unroll
        for (int u = 0; u < UNITS; u++) statistics[u][i] = own;
    }
    const i64 before = direction ? at.t + 1 : at.t - 1;
    const Real* const earlier = a.cells + (((i64)direction * a.time + before) * a.outer + b) * CARRIED * a.inner;
    const Value* const initial = a.c0 + plane * CARRIED * a.inner;
    Real* const dcell = a.dcell + plane * CARRIED * a.inner;
    Given given[UNITS];
    Returned above[UNITS];
    load_parameters(a.parameters, direction, row, given);
    load_masks(a.masks, a.directions, direction, at.t, a.time, b, a.outer, row, given);
    const Value* const gates = a.gates + place_of_gates;
    const Value* const dy = a.dy ? a.dy + direction * a.dy_direction + at.t * a.dy_time + b * a.dy_outer : nullptr;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int unit = row.near(u);
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) given[u].sums[sum] = widened(gates[sum * a.gates_gate + unit]);
#pragma unroll
        for (int i = 0; i < CARRIED; i++) {
            given[u].states[i] = initial_state(i);
            if (at.reads_state) given[u].states[i] = at.first ? widened(initial[i * a.inner + unit]) : earlier[i * a.inner + unit];
            const Real gradient = dcell[i * a.inner + unit];
            if (i < STATES)
                above[u].states[i] = gradient;
            else
                above[u].hidden = gradient;
        }
        if (CARRIED == STATES) above[u].hidden = 0;
        if (dy) above[u].hidden += widened(dy[unit]);
        if (at.last && a.dh_n) above[u].hidden += widened(a.dh_n[plane * a.inner + unit]);
    }

    wait_for_preceding_kernel();
    const Value* const product = a.product + direction * a.product_direction + (i64)b * a.inner;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const Real factor = a.factors ? a.factors[plane * a.inner + row.near(u)] : Real(1);
        for (int part = 0; part < a.parts; part++)
            if (!at.last) above[u].hidden += factor * widened(product[part * a.product_part + row.near(u)]);
    }
    Given found[UNITS];
    adjoint_of_row(given, above, found, statistics, row);
    Real* const dparameters = a.dparameters + plane * PARAMETERS * a.inner;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (!row.exists(u)) continue;
        const int unit = row.unit(u);
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) {
            const Value gradient = narrowed(found[u].sums[sum]);
            a.written[place_of_gates + sum * a.gates_gate + unit] = gradient;
            if (recurrent_gate(sum) >= 0)
                dgates[recurrent_gate(sum) * a.dgates_gate + unit] = at.reads_state ? gradient : narrowed(0);
        }
#pragma unroll
        for (int i = 0; i < CARRIED; i++) dcell[i * a.inner + unit] = at.reads_state ? found[u].states[i] : Real(0);
#pragma unroll
        for (int i = 0; i < PARAMETERS; i++)
            atomicAdd(dparameters + i * a.inner + unit, found[u].parameters[i]);  // by this thread alone, which need not wait
    }
}

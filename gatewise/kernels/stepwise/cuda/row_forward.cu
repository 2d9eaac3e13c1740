// The forward pass between two recurrent products, for cells that forward.cu does not support: one time step of the cell for a
// batch row in each block, so that the step can combine the hidden units of the row.
#include "recorded.cuh"
#include "row.cuh"

struct Forward {
    Value* gates;          // the input products of all steps; if `cells` is not null, overwritten by the sums of the steps
    const Value* product;  // the product of the hidden state before this step and the recurrent weights
    const Value* bias;     // the biases [D, SUMS * H] of the sums without an input product, or null
    Value* hidden;         // the hidden state [D, B, H], an operand of the next product; overwritten
    Real* cell;            // the carried states [D, B, CARRIED * H]; overwritten
    Value* output;         // the hidden states of all steps, zero after the end of a sequence; or null
    Real* cells;           // the carried states of all steps [D, T, B, CARRIED * H]; null if nothing is kept
    const i64* lengths;    // the lengths of the sequences [B]; null if all are T
    i64 gates_direction, gates_time, gates_outer, gates_gate;
    i64 product_direction, product_outer, product_gate;
    i64 output_direction, output_time, output_outer;
    int time, outer, inner, step;  // T, B and H, and the number of the step
    const bool* resets;            // the steps at which episodes begin [T, B], or null
    const Value* parameters;       // the parameters of the cell [D, PARAMETERS, H]
    Real* statistics;              // the statistics of all steps [D, T, B, STATISTICS], kept with `cells`
    const bool* masks;             // the masks of steps [MASKS, T, B, D * H]
    const Real* factors;           // the factors of the hidden state in the recurrent product [D, B, H], or null
    int directions;                // D
    Value* undropped;              // the hidden state without the factors [D, B, H]; overwritten; null without factors
};

#if TABLE
extern "C" __global__ void enter_row_forward(const Entered<Forward> a) { *a.table = a.arguments; }
extern "C" __global__ void advance_row_forward(const Recorded<Forward> a) { a.table->step += a.step; }

extern "C" __global__ void __launch_bounds__(THREADS) step_forward(const Recorded<Forward> recorded) {
    const Forward a = *recorded.table;
    const int step = a.step + recorded.step;
#else
extern "C" __global__ void __launch_bounds__(THREADS) step_forward(const Forward a) {
    const int step = a.step;
#endif
    const int b = blockIdx.x, direction = blockIdx.z;
    const Row row = {a.inner, Real(1) / a.inner};
    const RowStep at = row_step(a.lengths, a.resets, direction, b, a.outer, direction ? a.time - 1 - step : step, a.time);
    Value* const gates = a.gates + direction * a.gates_direction + at.t * a.gates_time + b * a.gates_outer;
    Real* const cell = a.cell + ((i64)direction * a.outer + b) * CARRIED * a.inner;
    Value* const output =
        a.output ? a.output + direction * a.output_direction + at.t * a.output_time + b * a.output_outer : nullptr;
    if (!at.active) {
        if (output)
            for (int u = 0; u < UNITS; u++)
                if (row.exists(u)) output[row.unit(u)] = narrowed(0);
        return;
    }
    Given given[UNITS];
    load_parameters(a.parameters, direction, row, given);
    load_masks(a.masks, a.directions, direction, at.t, a.time, b, a.outer, row, given);
    const Value* const bias = a.bias ? a.bias + (i64)direction * SUMS * a.inner : nullptr;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int unit = row.near(u);
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++)
            given[u].sums[sum] = input_gate(sum) >= 0 ? widened(gates[sum * a.gates_gate + unit])
                                 : bias               ? widened(bias[sum * a.inner + unit])
                                                      : Real(0);
#pragma unroll
        for (int i = 0; i < CARRIED; i++) given[u].states[i] = at.reads_state ? cell[i * a.inner + unit] : initial_state(i);
    }

    wait_for_preceding_kernel();
    const Value* const product = a.product + direction * a.product_direction + b * a.product_outer;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) {
            Real& total = given[u].sums[sum];
            if (recurrent_gate(sum) >= 0 && at.reads_state)
                total += widened(product[recurrent_gate(sum) * a.product_gate + row.near(u)]);
        }
    Returned returned[UNITS];
    Real statistics[UNITS][STATISTICS + 1];  // the same for all units
    step_of_row(given, returned, statistics, row);
    const i64 token = ((i64)direction * a.time + at.t) * a.outer + b;
    Real* const kept = a.cells ? a.cells + token * CARRIED * a.inner : nullptr;
    if (kept && threadIdx.x == 0)
#pragma unroll
        for (int i = 0; i < STATISTICS; i++) a.statistics[token * STATISTICS + i] = statistics[0][i];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (!row.exists(u)) continue;
        const int unit = row.unit(u);
        const Value hidden = narrowed(returned[u].hidden);
        const i64 place = ((i64)direction * a.outer + b) * a.inner + unit;
        a.hidden[place] = a.factors ? narrowed(widened(hidden) * a.factors[place]) : hidden;
        if (a.undropped) a.undropped[place] = hidden;
        if (output) output[unit] = hidden;
#pragma unroll
        for (int i = 0; i < CARRIED; i++) {
            const Real state = i < STATES ? returned[u].states[i] : returned[u].hidden;
            cell[i * a.inner + unit] = state;
            if (kept) kept[i * a.inner + unit] = state;
        }
        if (kept)
#pragma unroll
            for (int sum = 0; sum < SUMS; sum++) gates[sum * a.gates_gate + unit] = narrowed(given[u].sums[sum]);
    }
}

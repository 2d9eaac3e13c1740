// The forward pass between two recurrent products: one time step of the cell, element by element, for both directions.
#include "cell.cuh"
#include "place.cuh"
#include "recorded.cuh"
#include "resets.cuh"

struct Forward {
    // The input products of all steps, a plane for each gate sum. If `cells` is not null, the values that are kept for
    // the backward pass overwrite them.
    Value* gates;
    const Value* product;  // the product of the hidden state before this step and the recurrent weights
    // The biases [D, SUMS * H] of the sums that do not contain one yet, or null. These are all sums if COLUMN,
    // otherwise those without an input product.
    const Value* bias;
    Value* hidden;         // the hidden state [D, outer, inner]; overwritten
    Real* cell;            // the carried state [D, outer, inner]; overwritten
    Value* output;         // the hidden states of all steps, zero after the end of a sequence; or null
    Value* cells;          // the carried states of all steps [D, T, outer, inner]; null if nothing is kept
    const i64* lengths;    // the lengths of the sequences [B]; null if all are T
    i64 gates_direction, gates_time, gates_outer, gates_gate;
    i64 product_direction, product_outer, product_gate;
    i64 output_direction, output_time, output_outer;
    int time, outer, inner, step;
#if RESETS
    const bool* resets;    // the steps at which episodes begin [T, B]
#endif
};

#if TABLE
extern "C" __global__ void enter_forward(const Entered<Forward> a) { *a.table = a.arguments; }
extern "C" __global__ void advance_forward(const Recorded<Forward> a) { a.table->step += a.step; }

extern "C" __global__ void __launch_bounds__(THREADS) step_forward(const Recorded<Forward> recorded) {
    const Forward a = *recorded.table;
    const int step = a.step + recorded.step;
#else
extern "C" __global__ void __launch_bounds__(THREADS) step_forward(const Forward a) {
    const int step = a.step;
#endif
    const Place at = place();
    if (at.inner >= a.inner || at.outer >= a.outer) return;
    const int t = at.direction ? a.time - 1 - step : step;
    const i64 state = ((i64)at.direction * a.outer + at.outer) * a.inner + at.inner;
    Value* const gates =
        a.gates + at.direction * a.gates_direction + t * a.gates_time + at.outer * a.gates_outer + at.inner;
    Values sums[SUMS];
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++)
        if (input_gate(sum) >= 0) sums[sum] = load(gates + sum * a.gates_gate);
    Reals cell = load_reals(a.cell + state);
    const Steps found = steps(a.lengths, at, t, a.time);
#if RESETS
    const unsigned carried = carries(a.resets, found, at, t, a.outer, a.inner);
#else
    const unsigned carried = ALL_CARRIED;
#endif

    wait_for_preceding_kernel();
    const Value* const product =
        a.product + at.direction * a.product_direction + at.outer * a.product_outer + at.inner;
    Values products[GATES];
#pragma unroll
    for (int gate = 0; gate < GATES; gate++) products[gate] = load(product + gate * a.product_gate);
    Values hidden, output, kept;
    if (a.lengths) hidden = load(a.hidden + state);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        Real total[4] = {};
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) {
            if (input_gate(sum) >= 0) total[sum] = widened(sums[sum].at[k]);
            if (recurrent_gate(sum) >= 0 && carried >> k & 1) total[sum] += widened(products[recurrent_gate(sum)].at[k]);
#if COLUMN
            if (a.bias) total[sum] += widened(a.bias[(i64)(at.direction * SUMS + sum) * a.outer + at.outer]);
#else
            if (input_gate(sum) < 0 && a.bias) total[sum] += widened(a.bias[(i64)(at.direction * SUMS + sum) * a.inner + at.inner + k]);
#endif
        }
        const Real before = carried >> k & 1 ? cell.at[k] : Real(0);
        const Stepped next = stepped({total[0], total[1], total[2], total[3]}, before);
        if (found.active[k]) {
            cell.at[k] = next.state;
            hidden.at[k] = narrowed(next.hidden);
        }
        output.at[k] = found.active[k] ? hidden.at[k] : narrowed(0);
        kept.at[k] = narrowed(next.state);
        const Real own[4] = {next.kept.x, next.kept.y, next.kept.z, next.kept.w};
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) sums[sum].at[k] = narrowed(own[sum]);
    }
    store(a.hidden + state, hidden);
    store_reals(a.cell + state, cell);
    if (a.output)
        store(a.output + at.direction * a.output_direction + t * a.output_time + at.outer * a.output_outer + at.inner,
              output);
    if (a.cells) {
        store(a.cells + (((i64)at.direction * a.time + t) * a.outer + at.outer) * a.inner + at.inner, kept);
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) store(gates + sum * a.gates_gate, sums[sum]);
    }
}

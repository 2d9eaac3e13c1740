// The backward pass between two recurrent products: the adjoint of one time step of the cell, element by element, for
// both directions.
#include "cell.cuh"
#include "place.cuh"
#include "recorded.cuh"
#include "resets.cuh"

struct Backward {
    const Value* gates;    // the value that the forward pass kept for each gate sum of all steps
    Value* written;        // the gradients of the gate sums of all steps, with the strides of `gates`; may be `gates`
    Value* dgates;         // the gradients of this step's recurrent sums, an operand of the next product
    const Value* cells;    // the carried states of all steps [D, T, outer, inner]
    const Value* c0;       // the initial carried state [D, outer, inner]
    const Value* dy;       // the gradient of the outputs, or null
    const Value* dh_n;     // the gradient of the final hidden state [D, outer, inner], or null
    const Value* product;  // the gradient of the hidden state through the step after this one, as partial sums
    Real* dcell;           // the gradient of the carried state [D, outer, inner]; overwritten
    const i64* lengths;    // the lengths of the sequences [B]; null if all are T
    i64 gates_direction, gates_time, gates_outer, gates_gate;
    i64 dgates_direction, dgates_outer, dgates_gate;
    i64 dy_direction, dy_time, dy_outer;
    i64 product_direction, product_part;
    int parts;  // the number of partial sums, each a plane [outer, inner]
    int whole;  // whether `product` already contains `dh_n` and is valid at every step, as after a projection
    int time, outer, inner, step;
#if RESETS
    const bool* resets;  // the steps at which episodes begin [T, B]
#endif
};

#if TABLE
extern "C" __global__ void enter_backward(const Entered<Backward> a) { *a.table = a.arguments; }
extern "C" __global__ void advance_backward(const Recorded<Backward> a) { a.table->step += a.step; }

extern "C" __global__ void __launch_bounds__(THREADS) step_backward(const Recorded<Backward> recorded) {
    const Backward a = *recorded.table;
    const int step = a.step + recorded.step;
#else
extern "C" __global__ void __launch_bounds__(THREADS) step_backward(const Backward a) {
    const int step = a.step;
#endif
    const Place at = place();
    if (at.inner >= a.inner || at.outer >= a.outer) return;
    const int t = at.direction ? step : a.time - 1 - step;
    const int before = at.direction ? t + 1 : t - 1;
    const i64 plane = (i64)at.outer * a.inner + at.inner;
    const i64 state = (i64)at.direction * a.outer * a.inner + plane;
    const i64 place_of_gates =
        at.direction * a.gates_direction + t * a.gates_time + at.outer * a.gates_outer + at.inner;
    Values gates[SUMS];
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++) gates[sum] = load(a.gates + place_of_gates + sum * a.gates_gate);
    const Value* const cells = a.cells + (i64)at.direction * a.time * a.outer * a.inner + plane;
    const Values after = load(cells + (i64)t * a.outer * a.inner);
    const Values initial = load(a.c0 + state);
    Values earlier = initial;
    if (before >= 0 && before < a.time) earlier = load(cells + (i64)before * a.outer * a.inner);
    const Steps found = steps(a.lengths, at, t, a.time);
#if RESETS
    const unsigned reads_state = carries(a.resets, found, at, t, a.outer, a.inner);
#else
    const unsigned reads_state = ALL_CARRIED;
#endif
    Reals dcell = load_reals(a.dcell + state);
    Values dy, dh_n;
    if (a.dy) dy = load(a.dy + at.direction * a.dy_direction + t * a.dy_time + at.outer * a.dy_outer + at.inner);
    if (a.dh_n) dh_n = load(a.dh_n + state);

    wait_for_preceding_kernel();
    Real through[WIDTH];
    for (int k = 0; k < WIDTH; k++) through[k] = 0;
    if (step > 0 || a.whole)
        for (int part = 0; part < a.parts; part++) {
            const Values share = load(a.product + at.direction * a.product_direction + part * a.product_part + plane);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) through[k] += widened(share.at[k]);
        }
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        Real dh = through[k];
        if (found.last[k] && !a.whole) dh = a.dh_n ? widened(dh_n.at[k]) : Real(0);
        if (a.dy) dh += widened(dy.at[k]);
        Real kept[4] = {};
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) kept[sum] = widened(gates[sum].at[k]);
        const bool reads = reads_state >> k & 1;
        const Real before_step = reads ? widened(found.first[k] ? initial.at[k] : earlier.at[k]) : Real(0);
        Real carried = dcell.at[k];
        const Kept grad = adjoint(slopes({kept[0], kept[1], kept[2], kept[3]}, widened(after.at[k]), before_step), dh, carried);
        const bool active = found.active[k];
        if (active) dcell.at[k] = reads ? carried : Real(0);
        const Real own[4] = {grad.x, grad.y, grad.z, grad.w};
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++) gates[sum].at[k] = narrowed(active ? own[sum] : Real(0));
    }
    store_reals(a.dcell + state, dcell);
    Value* const dgates = a.dgates + at.direction * a.dgates_direction + at.outer * a.dgates_outer + at.inner;
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++) {
        // The next product hands these gradients to the state before the step, which an episode's first step does not
        // read.
        Values handed_on = gates[sum];
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            if (!(reads_state >> k & 1)) handed_on.at[k] = narrowed(0);
        if (recurrent_gate(sum) >= 0) store(dgates + recurrent_gate(sum) * a.dgates_gate, handed_on);
        store(a.written + place_of_gates + sum * a.gates_gate, gates[sum]);
    }
}

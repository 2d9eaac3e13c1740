// The element-wise operations between the projection and the next product: the masking of sequences that have ended,
// and in the backward pass the addition of the gradients of the outputs.
#include "place.cuh"

struct Forward {
    const Value* product;  // the projected hidden state of this step [D, outer, inner]
    Value* hidden;         // the hidden state [D, outer, inner]; overwritten for the sequences that have this step
    Value* output;         // the hidden states of all steps, zero after the end of a sequence
    const i64* lengths;    // the lengths of the sequences [B]; null if all are T
    i64 output_direction, output_time, output_outer;
    int time, outer, inner, step;
};

extern "C" __global__ void __launch_bounds__(THREADS) project_forward(const Forward a) {
    const Place at = place();
    if (at.inner >= a.inner || at.outer >= a.outer) return;
    const int t = at.direction ? a.time - 1 - a.step : a.step;
    const i64 state = ((i64)at.direction * a.outer + at.outer) * a.inner + at.inner;
    const Steps found = steps(a.lengths, at, t, a.time);
    wait_for_preceding_kernel();
    const Values product = load(a.product + state);
    Values hidden = load(a.hidden + state), output;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        if (found.active[k]) hidden.at[k] = product.at[k];
        output.at[k] = found.active[k] ? product.at[k] : narrowed(0);
    }
    store(a.hidden + state, hidden);
    store(a.output + at.direction * a.output_direction + t * a.output_time + at.outer * a.output_outer + at.inner, output);
}

struct Backward {
    const Value* product;  // the gradient of the hidden state through the step after this one [D, outer, inner]
    const Value* dy;       // the gradient of the outputs, or null
    const Value* dh_n;     // the gradient of the final hidden state [D, outer, inner], or null
    Value* dhidden;        // the total gradient of this step's projected hidden state [D, outer, inner]
    Value* written;        // these gradients for all steps [D, T, outer, inner]
    const i64* lengths;    // the lengths of the sequences [B]; null if all are T
    i64 dy_direction, dy_time, dy_outer;
    int time, outer, inner, step;
};

extern "C" __global__ void __launch_bounds__(THREADS) project_backward(const Backward a) {
    const Place at = place();
    if (at.inner >= a.inner || at.outer >= a.outer) return;
    const int t = at.direction ? a.step : a.time - 1 - a.step;
    const i64 plane = (i64)at.outer * a.inner + at.inner;
    const i64 state = (i64)at.direction * a.outer * a.inner + plane;
    const Steps found = steps(a.lengths, at, t, a.time);
    Values dy, dh_n, product, total;
    if (a.dy) dy = load(a.dy + at.direction * a.dy_direction + t * a.dy_time + at.outer * a.dy_outer + at.inner);
    if (a.dh_n) dh_n = load(a.dh_n + state);
    wait_for_preceding_kernel();
    product = load(a.product + state);
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        Real dh = widened(product.at[k]);
        if (found.last[k]) dh = a.dh_n ? widened(dh_n.at[k]) : Real(0);
        if (a.dy) dh += widened(dy.at[k]);
        total.at[k] = narrowed(found.active[k] ? dh : Real(0));
    }
    store(a.dhidden + state, total);
    store(a.written + ((i64)at.direction * a.time + t) * a.outer * a.inner + plane, total);
}

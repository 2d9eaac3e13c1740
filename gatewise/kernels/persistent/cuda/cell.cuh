// The LSTM cell and its adjoint on one hidden unit, in fp32.
#pragma once
#include "numerics.cuh"

struct Gates {
    float i, f, g, o;
};

__device__ __forceinline__ Gates activated(Gates sums) {
    return {sigmoid_of(sums.i), sigmoid_of(sums.f), tanh_of(sums.g), sigmoid_of(sums.o)};
}

// c = f c_before + i g;  h = o tanh(c)
__device__ __forceinline__ float next_cell(Gates gates, float before) { return fmaf(gates.f, before, gates.i * gates.g); }
__device__ __forceinline__ float hidden(Gates gates, float cell) { return gates.o * tanh_of(cell); }

// Gradients of the gate sums; `dc` comes in as the gradient of c and leaves as that of c_before.
__device__ __forceinline__ Gates adjoint(Gates gates, float cell, float before, float dh, float& dc) {
    const float squashed = tanh_of(cell);
    const float d = fmaf(dh * gates.o, 1.f - squashed * squashed, dc);
    dc = d * gates.f;
    return {d * gates.g * gates.i * (1.f - gates.i), d * before * gates.f * (1.f - gates.f),
            d * gates.i * (1.f - gates.g * gates.g), dh * squashed * gates.o * (1.f - gates.o)};
}

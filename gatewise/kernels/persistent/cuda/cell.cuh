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

// What the adjoint of a cell needs besides the gradients: how much of dh goes to c, of c's to the sums and to c_before.
struct Slopes {
    float cell, forget;
    Gates sums;
};

__device__ __forceinline__ Slopes slopes(Gates gates, float cell, float before) {
    const float squashed = tanh_of(cell);
    return {gates.o * (1.f - squashed * squashed), gates.f,
            {gates.g * gates.i * (1.f - gates.i), before * gates.f * (1.f - gates.f), gates.i * (1.f - gates.g * gates.g),
             squashed * gates.o * (1.f - gates.o)}};
}

// Gradients of the gate sums; `dc` comes in as the gradient of c and leaves as that of c_before.
__device__ __forceinline__ Gates adjoint(const Slopes& slope, float dh, float& dc) {
    const float d = fmaf(dh, slope.cell, dc);
    dc = d * slope.forget;
    return {d * slope.sums.i, d * slope.sums.f, d * slope.sums.g, dh * slope.sums.o};
}

// A sum over the steps of a sequence. EXACT ones are compensated (Kahan): their error does not grow with the steps.
struct LongSum {
    float total;
#if EXACT
    float excess;  // what rounding has made it too large by
#endif

    __device__ __forceinline__ void add(float value) {
#if EXACT
        const float next = value - excess, sum = total + next;
        excess = (sum - total) - next;
        total = sum;
#else
        total += value;
#endif
    }
};

struct GateSums {
    LongSum i, f, g, o;

    __device__ __forceinline__ void add(Gates gates) { i.add(gates.i), f.add(gates.f), g.add(gates.g), o.add(gates.o); }
    __device__ __forceinline__ float4 totals() const { return make_float4(i.total, f.total, g.total, o.total); }
};

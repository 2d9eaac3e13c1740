// The gate sums of a unit: their parts, and sums of their gradients over the steps of a sequence.
//
// The functions `input_gate` and `recurrent_gate` of the cell's code say which rows of the input and the recurrent weights and
// biases each gate sum of the step takes.
#pragma once
#define FAST_ACTIVATIONS 1  // calls of functions would take registers that hold weights
#include "cell.cuh"
#include "gates.cuh"

// Whether gate sum k takes the rows of gate k of both matrices, for all four sums.
constexpr bool SUMS_ARE_GATES = input_gate(0) == 0 && input_gate(1) == 1 && input_gate(2) == 2 && input_gate(3) == 3 &&
                                recurrent_gate(0) == 0 && recurrent_gate(1) == 1 && recurrent_gate(2) == 2 && recurrent_gate(3) == 3;

// The gate whose rows of a matrix a gate sum takes; -1 if it takes none.
__device__ __forceinline__ int gate_of(int sum, bool of_input_weights) { return of_input_weights ? input_gate(sum) : recurrent_gate(sum); }

// The gate sums of a step: the input's part, which was computed before the launch, the recurrent product and the biases.
__device__ __forceinline__ Gates total_sums(float4 recurrent, Gates input, float4 bias) {
    auto total = [](int sum, float recurrent, float input, float bias) {
        return (recurrent_gate(sum) < 0 ? 0.f : recurrent) + (input_gate(sum) < 0 ? 0.f : input) + bias;
    };
    return {total(0, recurrent.x, input.x, bias.x), total(1, recurrent.y, input.y, bias.y),
            total(2, recurrent.z, input.z, bias.z), total(3, recurrent.w, input.w, bias.w)};
}

// The bias of a gate sum of a unit, from both bias vectors [GATES * SIZE], or 0 if they are null.
__device__ __forceinline__ float bias_of(const Value* bias_ih, const Value* bias_hh, int sum, int unit) {
    const int input = input_gate(sum), recurrent = recurrent_gate(sum);
    if (!bias_ih || unit >= SIZE) return 0.f;
    return (input < 0 ? 0.f : widened(bias_ih[input * SIZE + unit])) + (recurrent < 0 ? 0.f : widened(bias_hh[recurrent * SIZE + unit]));
}

// A sum over the steps of a sequence. With EXACT it is compensated (Kahan), so that its error does not grow with the length.
struct LongSum {
    float total;
#if EXACT
    float excess;  // the rounding error of `total`
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
    LongSum x, y, z, w;

    __device__ __forceinline__ void add(Gates gates) { x.add(gates.x), y.add(gates.y), z.add(gates.z), w.add(gates.w); }
    __device__ __forceinline__ float4 totals() const { return make_float4(x.total, y.total, z.total, w.total); }
};

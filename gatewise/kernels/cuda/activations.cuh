// The logistic sigmoid and the hyperbolic tangent in three accuracies, and those of `Number`: `sigmoid_of` and `tanh_of`.
//
// 16-bit formats take the hardware's approximation. float32 takes the functions of the CUDA library, or, with
// FAST_ACTIVATIONS, functions without branches and calls; float64 takes the functions of the CUDA library.
#pragma once
#include "numbers.cuh"

// The hardware's approximation has a relative error of 2^-11, less than the rounding of a 16-bit result.
struct ApproximateActivations {
    __device__ __forceinline__ static float tanh_of(float x) {
        float y;
        asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }

    __device__ __forceinline__ static float sigmoid_of(float x) { return fmaf(0.5f, tanh_of(0.5f * x), 0.5f); }
};

// float32 functions with an error of a few units in the last place, of one exponential and one reciprocal each.
struct FastActivations {
    static constexpr float LOG2_E = 1.44269504f;

    __device__ __forceinline__ static float power_of_two(float x) {
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }

    __device__ __forceinline__ static float reciprocal(float x) {
        float y;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
    }

    __device__ __forceinline__ static float sigmoid_of(float x) { return reciprocal(1.f + power_of_two(-LOG2_E * x)); }

    // 1 - 2 / (1 + e^2x); near zero, where the difference would lose digits, x + x^3 P(x^2) with P fitted to 1e-9.
    __device__ __forceinline__ static float tanh_of(float x) {
        const float far = fmaf(-2.f, reciprocal(1.f + power_of_two(2.f * LOG2_E * x)), 1.f);
        const float square = x * x;
        float near = fmaf(square, -6.27423544e-3f, 2.10716762e-2f);
        near = fmaf(square, near, -5.38523085e-2f);
        near = fmaf(square, near, 1.33325860e-1f);
        near = fmaf(square, near, -3.33333164e-1f);
        return fabsf(x) < 0.55f ? fmaf(x * square, near, x) : far;
    }
};

// The functions of the CUDA library, with an error of a few units in the last place.
struct AccurateActivations {
    __device__ __forceinline__ static Real tanh_of(Real x) { return tanh(x); }
    __device__ __forceinline__ static Real sigmoid_of(Real x) { return Real(1) / (Real(1) + exp(-x)); }
};

#if VALUE_BYTES == 2
using Activations = ApproximateActivations;
#elif FAST_ACTIVATIONS
using Activations = FastActivations;
#else
using Activations = AccurateActivations;
#endif

__device__ __forceinline__ Real tanh_of(Real x) { return Activations::tanh_of(x); }
__device__ __forceinline__ Real sigmoid_of(Real x) { return Activations::sigmoid_of(x); }

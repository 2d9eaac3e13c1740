// Functions that the generated code of a cell calls in addition to `sigmoid_of` and `tanh_of`. They propagate NaN.
#pragma once

__device__ __forceinline__ Real relu_of(Real x) { return x <= Real(0) ? Real(0) : x; }
__device__ __forceinline__ Real larger_of(Real a, Real b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ Real smaller_of(Real a, Real b) { return a < b || a != a ? a : b; }

// Comparisons as numbers, where two values are equal as PyTorch's derivatives take them.
__device__ __forceinline__ Real larger(Real a, Real b) { return a > b ? Real(1) : a == b ? Real(0.5) : Real(0); }
__device__ __forceinline__ Real at_least(Real a, Real b) { return a >= b ? Real(1) : Real(0); }

// Number formats: the type `Value` of elements in memory, the type `Real` of the computation, conversions between them,
// and vectors of WIDTH elements that one instruction loads or stores. The macro DTYPE selects bfloat16 (0), float16
// (1), float32 (2) or float64 (3). Conversions are inline PTX, so that no CUDA headers are needed. `tanh_of`
// and `sigmoid_of` are accurate enough for each format.
#pragma once

using i64 = long long;

#if DTYPE == 3
using Value = double;
using Real = double;
#elif DTYPE == 2
using Value = float;
using Real = float;
#else
using Value = unsigned short;  // the bits of a bfloat16 or float16
using Real = float;
#endif

__device__ __forceinline__ Real widened(Value value) {
#if DTYPE == 0
    return __uint_as_float((unsigned)value << 16);
#elif DTYPE == 1
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
#else
    return value;
#endif
}

__device__ __forceinline__ Value narrowed(Real value) {
#if DTYPE == 0
    Value bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#elif DTYPE == 1
    Value bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    return value;
#endif
}

constexpr int REAL_ALIGNMENT = WIDTH * sizeof(Real) > 16 ? 16 : WIDTH * sizeof(Real);

struct alignas(WIDTH * sizeof(Value)) Values {
    Value at[WIDTH];
};

struct alignas(REAL_ALIGNMENT) Reals {
    Real at[WIDTH];
};

__device__ __forceinline__ Values load(const Value* from) { return *(const Values*)from; }
__device__ __forceinline__ Reals load_reals(const Real* from) { return *(const Reals*)from; }
__device__ __forceinline__ void store(Value* to, const Values& values) { *(Values*)to = values; }
__device__ __forceinline__ void store_reals(Real* to, const Reals& reals) { *(Reals*)to = reals; }

// For 16-bit dtypes the relative error is 2^-11, which is less than the rounding of the result; otherwise the error is
// a few units in the last place.
#if DTYPE >= 2
__device__ __forceinline__ Real tanh_of(Real x) { return tanh(x); }
__device__ __forceinline__ Real sigmoid_of(Real x) { return Real(1) / (Real(1) + exp(-x)); }
#else
__device__ __forceinline__ float tanh_of(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float sigmoid_of(float x) { return fmaf(0.5f, tanh_of(0.5f * x), 0.5f); }
#endif

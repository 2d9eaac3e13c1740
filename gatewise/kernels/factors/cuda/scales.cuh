// Powers of two by which float32 values are multiplied before they are rounded to float16, and results after the product.
//
// Float16 has as many mantissa bits as TF32, but fewer exponents. Values are therefore multiplied by the power of two that
// brings the largest of them to [2^14, 2^15), which loses nothing. That power is 2^(TOP - e) with e the biased exponent of the
// largest, and is never stored: what is stored is e of each row of gradients, and the bits of the largest magnitude of
// everything else.
#pragma once
#include "numbers.cuh"

constexpr int TOP = 14 + Float32::EXPONENT_BIAS;

// The biased exponent of the largest magnitude, from its bits; numbers below the smallest normal one count as that one. The
// bits are negative where there is no finite number.
__device__ __forceinline__ int exponent_of_largest(int bits) { return max(bits >> Float32::MANTISSA_BITS, 1); }

// A multiplication by 2^exponent for exponents up to 252, in two steps because float32 has no powers beyond 2^127. Below
// 2^-252 every product of float16 numbers is 0 in float32, as it is here.
struct Scale {
    float first, second;

    __device__ __forceinline__ static Scale of(int exponent) {
        const int all = max(exponent, -252), part = all / 2;
        return {Float32::power_of_two(Float32::EXPONENT_BIAS + part), Float32::power_of_two(Float32::EXPONENT_BIAS + all - part)};
    }
    __device__ __forceinline__ float operator()(float value) const { return value * first * second; }
};

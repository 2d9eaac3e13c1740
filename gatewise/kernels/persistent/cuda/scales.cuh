// Powers of two by which float32 values are multiplied before they are rounded to float16, and results after the product.
//
// Float16 has as many mantissa bits as TF32, but fewer exponents. Values are therefore multiplied by the power of two that
// brings the largest of them to [2^14, 2^15), which loses nothing. Powers are never stored, but the exponents of largest values:
// e for a value in [2^e, 2^(e + 1)), counted from that of the smallest number, 2^-149, so that none is negative.
#pragma once
#include "numbers.cuh"

constexpr int SMALLEST = Float32::EXPONENT_BIAS - 1 + Float32::MANTISSA_BITS;  // the smallest number is 2^-SMALLEST
constexpr int TOP = 14 + SMALLEST;
constexpr int NOTHING = -1024;  // in place of the exponent of 0; sums with it are negative, and powers of two as small as can be

// The exponent of the largest magnitude, from its bits, which are 0 or negative where no finite number other than 0 is. The
// mantissa of a subnormal number is a whole number of the smallest one.
__device__ __forceinline__ int exponent_of_largest(int bits) {
    const int normal = bits >> Float32::MANTISSA_BITS;
    const int exponent = normal ? normal - Float32::EXPONENT_BIAS + SMALLEST : 31 - __clz(bits);
    return bits > 0 ? exponent : NOTHING;
}

// A multiplication by 2^exponent, in two steps because float32 has no powers beyond 2^127. Larger exponents than 252 are needed
// for zeros only. Below 2^-252 every product of float16 numbers is 0 in float32, and every float32 number in float16.
struct Scale {
    float first, second;

    __device__ __forceinline__ static Scale of(int exponent) {
        const int all = min(max(exponent, -252), 252), part = all / 2;
        return {Float32::power_of_two(Float32::EXPONENT_BIAS + part), Float32::power_of_two(Float32::EXPONENT_BIAS + all - part)};
    }
    __device__ __forceinline__ float operator()(float value) const { return value * first * second; }
};

// The exponents of consecutive columns, read as one word.
template <int COUNT>
struct alignas(4 * COUNT) Exponents {
    int at[COUNT];
};

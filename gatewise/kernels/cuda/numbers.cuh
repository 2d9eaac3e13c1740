// Number formats, one struct for each. The macro DTYPE selects the format `Number` of tensors: bfloat16 (0), float16 (1),
// float32 (2) or float64 (3), as in formats.py.
//
// A format of tensors has these members:
//
//     Value, Real       the type of a number in memory, and the type of the computation
//     widened           from Value to Real
//     narrowed          from Real to Value, rounded to nearest
//
// Formats of up to 32 bits can also be read and written as bits, which blocks exchange:
//
//     Bits              an unsigned integer of the same size
//     from_bits         from the lowest bits of a word to Real
//     canonical_bits    from Real to the lowest bits of a word, where NaN is a positive NaN; so the bits are never all 1
//
// 16-bit formats also convert pairs, words with a low and a high number. Conversions are inline PTX, so that no CUDA
// headers are needed.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct BFloat16 {
    using Value = u16;  // the bits of a number
    using Real = float;
    using Bits = u16;

    __device__ __forceinline__ static float widened(Value value) { return __uint_as_float((u32)value << 16); }
    __device__ __forceinline__ static float from_bits(u32 bits) { return __uint_as_float(bits << 16); }

    __device__ __forceinline__ static Value narrowed(float value) {
        Value bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }

    __device__ __forceinline__ static u32 pair(float low, float high) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }

    // The instruction that converts two values is the faster one; it converts a NaN to 0x7FFF.
    __device__ __forceinline__ static u32 canonical_bits(float value) { return pair(value, 0.f); }

    __device__ __forceinline__ static float low(u32 pair) { return from_bits(pair & 0xffffu); }
    __device__ __forceinline__ static float high(u32 pair) { return from_bits(pair >> 16); }
};

struct Float16 {
    using Value = u16;  // the bits of a number
    using Real = float;
    using Bits = u16;
    static constexpr int MANTISSA_BITS = 10;
    static constexpr u32 INFINITE = 31u << MANTISSA_BITS;  // bits

    __device__ __forceinline__ static float widened(Value value) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
        return wide;
    }

    __device__ __forceinline__ static float from_bits(u32 bits) { return widened((Value)bits); }

    __device__ __forceinline__ static Value narrowed(float value) {
        Value bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }

    __device__ __forceinline__ static u32 pair(float low, float high) {
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }

    // The instruction that converts two values is the faster one; it converts a NaN to 0x7FFF.
    __device__ __forceinline__ static u32 canonical_bits(float value) { return pair(value, 0.f); }

    __device__ __forceinline__ static float low(u32 pair) { return from_bits(pair & 0xffffu); }
    __device__ __forceinline__ static float high(u32 pair) { return from_bits(pair >> 16); }

    // The larger magnitude of each half of two pairs, the first of which has no sign; a NaN is ignored.
    __device__ __forceinline__ static u32 larger_magnitudes(u32 most, u32 pair) {
        asm("{\n\t.reg .b32 size;\n\tabs.f16x2 size, %1;\n\tmax.f16x2 %0, %0, size;\n\t}" : "+r"(most) : "r"(pair));
        return most;
    }
};

struct Float32 {
    using Value = float;
    using Real = float;
    using Bits = u32;
    static constexpr int MANTISSA_BITS = 23, EXPONENT_BIAS = 127;
    static constexpr u32 INFINITE = 0x7f800000u, NOT_A_NUMBER = 0x7fc00000u;  // bits

    __device__ __forceinline__ static float widened(float value) { return value; }
    __device__ __forceinline__ static float narrowed(float value) { return value; }
    __device__ __forceinline__ static float from_bits(u32 bits) { return __uint_as_float(bits); }
    __device__ __forceinline__ static u32 to_bits(float value) { return __float_as_uint(value); }

    // A NaN becomes one that remains a NaN when half of TF32's last bit is added to its bits.
    __device__ __forceinline__ static u32 canonical_bits(float value) { return value == value ? __float_as_uint(value) : NOT_A_NUMBER; }

    __device__ __forceinline__ static float infinity() { return __uint_as_float(INFINITE); }
    __device__ __forceinline__ static float not_a_number() { return __uint_as_float(NOT_A_NUMBER); }

    // A power of two, from its biased exponent; and the biased exponent of a number without a sign.
    __device__ __forceinline__ static float power_of_two(int exponent) { return __uint_as_float((u32)exponent << MANTISSA_BITS); }
    __device__ __forceinline__ static int exponent_of(float value) { return __float_as_uint(value) >> MANTISSA_BITS; }

    // The bits of a number's magnitude; 0 for infinities and NaN.
    __device__ __forceinline__ static u32 finite_magnitude(u32 bits) { return (bits & 0x7fffffffu) < INFINITE ? bits & 0x7fffffffu : 0u; }
};

// The factors of float32 products on tensor cores: float32 with 10 bits of mantissa, in 32 bits of which the last 13 are
// ignored. This is no format of tensors.
struct TF32 {
    // Rounds the bits of a float32 number to nearest.
    __device__ __forceinline__ static u32 rounded(u32 bits) {
        u32 factor;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(factor) : "f"(__uint_as_float(Float32::canonical_bits(__uint_as_float(bits)))));
        return factor;
    }

    // A float32 number as the sum of two TF32 numbers, with a relative error of 2^-23. Tensor cores ignore the bits below
    // TF32's last bit, so adding half of that bit rounds to nearest. The low part of an infinity is almost 0.
    __device__ __forceinline__ static u32 high_part(u32 bits) { return (bits + 0x1000u) & 0xffffe000u; }
    __device__ __forceinline__ static u32 low_part(u32 bits, u32 high) {
        return __float_as_uint(__uint_as_float(bits) - __uint_as_float(high)) + 0x1000u;
    }
};

struct Float64 {
    using Value = double;
    using Real = double;

    __device__ __forceinline__ static double widened(double value) { return value; }
    __device__ __forceinline__ static double narrowed(double value) { return value; }
};

#if DTYPE == 0
using Number = BFloat16;
#elif DTYPE == 1
using Number = Float16;
#elif DTYPE == 2
using Number = Float32;
#else
using Number = Float64;
#endif
#define VALUE_BYTES (DTYPE == 3 ? 8 : DTYPE == 2 ? 4 : 2)
static_assert(sizeof(Number::Value) == VALUE_BYTES, "a constant that the preprocessor can compare");

using Real = Number::Real;

// fp32 numbers. Products round their operands as TF32 does, to 10 bits of mantissa, to nearest; EXACT ones add the products of
// what the rounding takes away, and are as close as fp32's own.
//
// Those 10 bits are fp16's too: with powers of two taken out beforehand (product.cuh), operands are multiplied as fp16, in
// half the room and half the time.
#pragma once

using Value = u32;

constexpr int SPAN = 16;            // values in four lanes' loads of 16 bytes
constexpr int VALUES_PER_WORD = 1;  // of 32 bits

__device__ __forceinline__ float widened(u32 bits) { return __uint_as_float(bits); }

// NaN becomes one that stays a NaN when half of the last place of TF32 is added to its bits.
__device__ __forceinline__ u32 narrowed(float value) { return value == value ? __float_as_uint(value) : 0x7fc00000u; }

#if EXACT

__device__ __forceinline__ u32 rounded(u32 bits) { return narrowed(__uint_as_float(bits)); }

// sum[16 x 8] += a[16 x 8] b[8 x 8] in TF32, accumulated in fp32.
__device__ __forceinline__ void multiply_rounded(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A number as the sum of two of TF32, up to 2^-23 of it. Tensor cores read no bit below the last that counts, so adding half
// of that one's worth rounds to nearest. Of an infinity the low part is next to nothing.
__device__ __forceinline__ u32 high_part(u32 bits) { return (bits + 0x1000u) & 0xffffe000u; }
__device__ __forceinline__ u32 low_part(u32 bits, u32 high) {
    return __float_as_uint(__uint_as_float(bits) - __uint_as_float(high)) + 0x1000u;
}

// The products of two low parts, 2^-22 of the whole, are left out; the small products come first.
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b0_high = high_part(b0), b1_high = high_part(b1);
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 own = a[i];
        asm volatile("" : "+r"(own));  // parted anew each time: both parts of all weights would not fit in registers
        high[i] = high_part(own), low[i] = low_part(own, high[i]);
    }
    multiply_rounded(sum, low, b0_high, b1_high);
    multiply_rounded(sum, high, low_part(b0, b0_high), low_part(b1, b1_high));
    multiply_rounded(sum, high, b0_high, b1_high);
}

#else

__device__ __forceinline__ u32 rounded(u32 bits) {
    u32 operand;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(operand) : "f"(__uint_as_float(narrowed(__uint_as_float(bits)))));
    return operand;
}

__device__ __forceinline__ u32 packed_halves(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Of each half, the larger magnitude; a NaN counts as nothing.
__device__ __forceinline__ u32 larger_halves(u32 most, u32 pair) {
    asm("{\n\t.reg .b32 size;\n\tabs.f16x2 size, %1;\n\tmax.f16x2 %0, %0, size;\n\t}" : "+r"(most) : "r"(pair));
    return most;
}

// sum[16 x 8] += a[16 x 16] b[16 x 8] in fp16, accumulated in fp32.
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.44269504f;

__device__ __forceinline__ float sigmoid_of(float x) { return reciprocal(1.f + power_of_two(-LOG2_E * x)); }

// 1 - 2 / (1 + e^2x); near zero, where the difference would cancel, x + x^3 P(x^2), fitted to 1e-9.
__device__ __forceinline__ float tanh_of(float x) {
    const float far = fmaf(-2.f, reciprocal(1.f + power_of_two(2.f * LOG2_E * x)), 1.f);
    const float square = x * x;
    float near = fmaf(square, -6.27423544e-3f, 2.10716762e-2f);
    near = fmaf(square, near, -5.38523085e-2f);
    near = fmaf(square, near, 1.33325860e-1f);
    near = fmaf(square, near, -3.33333164e-1f);
    return fabsf(x) < 0.55f ? fmaf(x * square, near, x) : far;
}

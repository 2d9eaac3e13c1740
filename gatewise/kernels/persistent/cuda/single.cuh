// fp32 numbers. Products round their factors as TF32 does, to nearest with 10 bits of mantissa; EXACT ones add the products of
// the rounding errors, and are as accurate as fp32's own.
//
// fp16 has 10 bits of mantissa, too: after powers of two are factored out (product.cuh), the rounded factors are multiplied in
// fp16, in half the memory and half the time.
#pragma once

using Value = u32;

constexpr int SPAN = 16;            // the values that four lanes load, 16 bytes each
constexpr int VALUES_PER_WORD = 1;  // of 32 bits

__device__ __forceinline__ float widened(u32 bits) { return __uint_as_float(bits); }

// A NaN becomes one that remains a NaN when half of TF32's last bit is added to its bits.
__device__ __forceinline__ u32 narrowed(float value) { return value == value ? __float_as_uint(value) : 0x7fc00000u; }

#if EXACT

__device__ __forceinline__ u32 rounded(u32 bits) { return narrowed(__uint_as_float(bits)); }

// sum[16 x 8] += a[16 x 8] b[8 x 8] in TF32, accumulated in fp32.
__device__ __forceinline__ void multiply_rounded(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A number as the sum of two TF32 numbers, with a relative error of 2^-23. Tensor cores ignore the bits below TF32's last bit,
// so adding half of that bit rounds to nearest. The low part of an infinity is almost 0.
__device__ __forceinline__ u32 high_part(u32 bits) { return (bits + 0x1000u) & 0xffffe000u; }
__device__ __forceinline__ u32 low_part(u32 bits, u32 high) {
    return __float_as_uint(__uint_as_float(bits) - __uint_as_float(high)) + 0x1000u;
}

// The product of two low parts, 2^-22 of the whole, is omitted; the small products are added first.
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b0_high = high_part(b0), b1_high = high_part(b1);
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 own = a[i];
        asm volatile("" : "+r"(own));  // split again each time: both parts of all weights would not fit in registers
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

// The larger magnitude of each half; a NaN is ignored.
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

// 1 - 2 / (1 + e^2x); near zero, where the difference would lose digits, x + x^3 P(x^2) with P fitted to 1e-9.
__device__ __forceinline__ float tanh_of(float x) {
    const float far = fmaf(-2.f, reciprocal(1.f + power_of_two(2.f * LOG2_E * x)), 1.f);
    const float square = x * x;
    float near = fmaf(square, -6.27423544e-3f, 2.10716762e-2f);
    near = fmaf(square, near, -5.38523085e-2f);
    near = fmaf(square, near, 1.33325860e-1f);
    near = fmaf(square, near, -3.33333164e-1f);
    return fabsf(x) < 0.55f ? fmaf(x * square, near, x) : far;
}

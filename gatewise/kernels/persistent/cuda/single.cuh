// fp32 numbers. Products round their operands to TF32: 10 bits of mantissa, to nearest.
#pragma once

using Value = u32;

constexpr int SPAN = 16;            // values in four lanes' loads of 16 bytes
constexpr int VALUES_PER_WORD = 1;  // of 32 bits

__device__ __forceinline__ float widened(u32 bits) { return __uint_as_float(bits); }

// NaN becomes one that stays a NaN when half of the last place of TF32 is added to its bits.
__device__ __forceinline__ u32 narrowed(float value) { return value == value ? __float_as_uint(value) : 0x7fc00000u; }

__device__ __forceinline__ u32 rounded(u32 bits) {
    u32 operand;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(operand) : "f"(__uint_as_float(narrowed(__uint_as_float(bits)))));
    return operand;
}

// sum[16 x 8] += a[16 x 8] b[8 x 8], accumulated in fp32.
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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

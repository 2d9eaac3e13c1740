// 16-bit numbers: fp16 or bf16. Conversions return 0x7FFF for a NaN.
#pragma once

using Value = u16;

constexpr int SPAN = 32;            // the values that four lanes load, 16 bytes each
constexpr int VALUES_PER_WORD = 2;  // of 32 bits

__device__ __forceinline__ float widened(u32 bits) {
#if FLOAT16
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
    return value;
#else
    return __uint_as_float(bits << 16);
#endif
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 pair;
#if FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ __forceinline__ u32 narrowed(float value) {
    return packed(value, 0.f);  // the instruction that converts two values is the faster one
}

__device__ __forceinline__ float low_half(u32 pair) { return widened(pair & 0xffffu); }
__device__ __forceinline__ float high_half(u32 pair) { return widened(pair >> 16); }

// Factors of products are not rounded.
__device__ __forceinline__ u32 rounded(u32 pair) { return pair; }

// sum[16 x 8] += a[16 x 16] b[16 x 8], accumulated in fp32.
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if FLOAT16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit values, of which each lane of a warp holds two in row-major order.
__device__ __forceinline__ u32 transposed_matrix(u32 pair) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

// The hardware's approximation has a relative error of 2^-11, less than the rounding of a 16-bit result.
__device__ __forceinline__ float tanh_of(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float sigmoid_of(float x) { return fmaf(0.5f, tanh_of(0.5f * x), 0.5f); }

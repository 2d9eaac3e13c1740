// Matrix products on tensor cores, and the format of their factors, `Factor`.
//
// bfloat16 and float16 numbers are multiplied as they are. float32 numbers are multiplied in one of two ways, which the macro
// EXACT selects:
//
// - EXACT products add the products of the rounding errors to those of the numbers rounded to TF32, and are as accurate as
//   float32's own.
// - SCALED products round their factors to 10 bits of mantissa, as TF32 does. float16 has 10 bits of mantissa, too: after
//   powers of two are factored out, the rounded factors are multiplied in float16, in half the memory and half the time.
#pragma once
#include "memory.cuh"
#include "numbers.cuh"

#define SCALED (DTYPE == 2 && !EXACT)

#if SCALED
using Factor = Float16;
#else
using Factor = Number;
#endif

// sum[16 x 8] += a[16 x 16] b[16 x 8], accumulated in float32; in EXACT products, a[16 x 8] b[8 x 8]. Each lane holds two
// rows of `a`, at the distance of 8, and a column of `b`.
template <class Format>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
__device__ __forceinline__ void multiply<BFloat16>(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply<Float16>(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply<TF32>(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The product of two low parts, 2^-22 of the whole, is omitted; the small products are added first.
template <>
__device__ __forceinline__ void multiply<Float32>(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b0_high = TF32::high_part(b0), b1_high = TF32::high_part(b1);
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 own = a[i];
        forget_results_of(own);  // both parts of all weights would not fit in registers
        high[i] = TF32::high_part(own), low[i] = TF32::low_part(own, high[i]);
    }
    multiply<TF32>(sum, low, b0_high, b1_high);
    multiply<TF32>(sum, high, TF32::low_part(b0, b0_high), TF32::low_part(b1, b1_high));
    multiply<TF32>(sum, high, b0_high, b1_high);
}

// A word of factors, rounded as products round it.
__device__ __forceinline__ u32 rounded(u32 word) {
#if SCALED
    return TF32::rounded(word);
#elif VALUE_BYTES == 4
    return Float32::canonical_bits(Float32::from_bits(word));
#else
    return word;
#endif
}

// Loads four 8 x 8 matrices of 16-bit values from shared memory and transposes them; lane 8 i + q passes the address of row q of
// matrix i.
__device__ __forceinline__ uint4 load_transposed_matrices(const char* row) {
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(shared_address(row))
                 : "memory");
    return words;
}

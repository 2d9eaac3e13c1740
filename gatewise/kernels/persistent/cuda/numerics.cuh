// The numbers that tensors hold. No CUDA headers: conversions are inline PTX.
//
// FLOAT32 chooses fp32, with products rounded as TF32's or EXACT ones; FLOAT16 fp16; otherwise the numbers are bf16. Each
// header has a type `Value` for the bits of a number in memory, SPAN, conversions, the rounding of operands, tensor-core
// products and activations. NaN leaves every conversion as a positive NaN, so the pattern of ones, which the exchange uses
// for "not yet written", is never a result.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 EVERY_LANE = 0xffffffffu;

#define SCALED (FLOAT32 && !EXACT)  // products take fp16 of numbers with powers of two taken out

// Numbers that are rounded to TF32 leave the last place free. It marks gates that are kept, so that the gradients of their sums
// can take their place one by one, and be told from them (exchange.cuh).
constexpr u32 MARK = SCALED ? 1u : 0u;

// A gate, rounded to the place before the last, with the mark; and without.
__device__ __forceinline__ u32 marked(u32 gate) { return (gate + (gate >> 1 & MARK)) | MARK; }
__device__ __forceinline__ u32 unmarked(u32 word) { return word & ~MARK; }

#if FLOAT32
#include "single.cuh"
#else
#include "half.cuh"
#endif

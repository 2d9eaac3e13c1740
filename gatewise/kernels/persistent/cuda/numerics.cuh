// The numbers that tensors hold. No CUDA headers: conversions are inline PTX.
//
// FLOAT32 selects fp32, with EXACT products or with products rounded as TF32's; FLOAT16 selects fp16; otherwise the numbers
// are bf16. Each header has a type `Value` for the bits of a number in memory, SPAN, conversions, the rounding of factors,
// tensor-core products and activation functions. Every conversion returns a positive NaN for a NaN, so all bits 1, the
// pattern that the exchange uses for "not yet written", are never a result.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 EVERY_LANE = 0xffffffffu;

#define SCALED (FLOAT32 && !EXACT)  // products are of fp16 numbers, after powers of two were factored out

// The last bit of numbers that are rounded to TF32 is unused. Kept gates have it set, so that the gradients of the gate sums can
// overwrite them one by one and be distinguished from them (exchange.cuh).
constexpr u32 MARK = SCALED ? 1u : 0u;

// A gate, rounded to the last bit but one, with the mark; and a word without the mark.
__device__ __forceinline__ u32 marked(u32 gate) { return (gate + (gate >> 1 & MARK)) | MARK; }
__device__ __forceinline__ u32 unmarked(u32 word) { return word & ~MARK; }

#if FLOAT32
#include "single.cuh"
#else
#include "half.cuh"
#endif

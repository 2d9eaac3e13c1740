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

#if FLOAT32
#include "single.cuh"
#else
#include "half.cuh"
#endif

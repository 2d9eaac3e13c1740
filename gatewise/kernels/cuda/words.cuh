// Tensors as words of 32 bits, which have one number of 32 bits or two of 16 bits.
#pragma once
#include "numbers.cuh"

using Value = Number::Bits;

constexpr int VALUES_PER_WORD = 4 / sizeof(Value);

__device__ __forceinline__ float widened(u32 bits) { return Number::from_bits(bits); }
__device__ __forceinline__ u32 canonical(float value) { return Number::canonical_bits(value); }

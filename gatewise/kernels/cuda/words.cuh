// Tensors as words of 32 bits, which have one number of 32 bits or two of 16 bits.
#pragma once
#include "numbers.cuh"

using Value = Number::Bits;

constexpr int VALUES_PER_WORD = 4 / sizeof(Value);

__device__ __forceinline__ float widened(u32 bits) { return Number::from_bits(bits); }
__device__ __forceinline__ u32 canonical(float value) { return Number::canonical_bits(value); }

// The words of four numbers, and four zeros.
#if VALUE_BYTES == 4
using FourValues = uint4;
__device__ __forceinline__ FourValues four_zeros() { return make_uint4(0, 0, 0, 0); }
#else
using FourValues = uint2;
__device__ __forceinline__ FourValues four_zeros() { return make_uint2(0, 0); }
#endif

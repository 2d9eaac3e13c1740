// Definitions shared by the element-wise kernels of a decoder: operands and results of products, and dropout masks.
//
// HALVES: operands of products are float16 while other numbers are float32. float16 has the ten mantissa bits that
// TensorFloat-32 products use. Gradients, whose magnitude varies, are scaled by a power of two for each row.
#pragma once
#include "launch.cuh"
#include "vectors.cuh"

using Flag = unsigned char;

struct alignas(WIDTH) Flags {
    Flag at[WIDTH];
};

__device__ __forceinline__ Flags load_flags(const Flag* mask, i64 at) { return *(const Flags*)(mask + at); }

#if HALVES
using OperandNumber = Float16;
#else
using OperandNumber = Number;
#endif
using Operand = OperandNumber::Value;

__device__ __forceinline__ Real of_operand(Operand bits) { return OperandNumber::widened(bits); }
__device__ __forceinline__ Operand operand(Real value) { return OperandNumber::narrowed(value); }

struct alignas(WIDTH * sizeof(Operand)) Operands {
    Operand at[WIDTH];
};

__device__ __forceinline__ Operands load_operands(const Operand* from) { return *(const Operands*)from; }
__device__ __forceinline__ void store_operands(Operand* to, const Operands& values) { *(Operands*)to = values; }

// A gradient as the result of one or more products: partial sums in planes [B, H].
struct Planes {
    const Value* planes;  // null for none
    i64 row, part;        // strides
    i64 parts;
    const Real* scale;  // the scale of each row; or null for 1
};

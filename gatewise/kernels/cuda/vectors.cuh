// Tensors as vectors of WIDTH numbers, which one instruction loads or stores.
#pragma once
#include "numbers.cuh"

using Value = Number::Value;

__device__ __forceinline__ Real widened(Value value) { return Number::widened(value); }
__device__ __forceinline__ Value narrowed(Real value) { return Number::narrowed(value); }

constexpr int REAL_ALIGNMENT = WIDTH * sizeof(Real) > 16 ? 16 : WIDTH * sizeof(Real);

struct alignas(WIDTH * sizeof(Value)) Values {
    Value at[WIDTH];
};

struct alignas(REAL_ALIGNMENT) Reals {
    Real at[WIDTH];
};

__device__ __forceinline__ Values load(const Value* from) { return *(const Values*)from; }
__device__ __forceinline__ Reals load_reals(const Real* from) { return *(const Reals*)from; }
__device__ __forceinline__ void store(Value* to, const Values& values) { *(Values*)to = values; }
__device__ __forceinline__ void store_reals(Real* to, const Reals& reals) { *(Reals*)to = reals; }

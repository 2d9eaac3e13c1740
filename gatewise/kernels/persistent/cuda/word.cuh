// What copies load and store. Without HALVES both are words of BYTES, 2, 4, 8 or 16. With HALVES, copies load words of BYTES,
// 4, 8 or 16, with float32 numbers, multiply these by powers of two, and store them as float16 numbers.
#pragma once
#if HALVES
#include "scales.cuh"

struct alignas(BYTES) Word {
    float at[BYTES / 4];
};
struct alignas(BYTES / 2) Stored {
    Float16::Value at[BYTES / 4];
};
__device__ __forceinline__ Stored zero() { return {}; }

// The scales of a word's numbers, from the largest exponents of a row and of the columns.
struct Scales {
    Exponents<BYTES / 4> columns;
    int row;

    __device__ __forceinline__ Scale operator()(int i) const { return Scale::of(TOP + row - columns.at[i]); }
};
__device__ __forceinline__ Scales scales_of(const int* columns, int row, int word) {
    return {((const Exponents<BYTES / 4>*)columns)[word], row};
}
// The word is no reference, with which each of its numbers would take a load.
__device__ __forceinline__ Stored stored(Word word, const Scales& scales) {
    Stored found;
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) found.at[i] = Float16::narrowed(scales(i)(word.at[i]));
    return found;
}
#else
#if BYTES == 2
using Word = unsigned short;
__device__ __forceinline__ Word zero() { return 0; }
#elif BYTES == 4
using Word = unsigned int;
__device__ __forceinline__ Word zero() { return 0; }
#elif BYTES == 8
using Word = uint2;
__device__ __forceinline__ Word zero() { return make_uint2(0, 0); }
#else
using Word = uint4;
__device__ __forceinline__ Word zero() { return make_uint4(0, 0, 0, 0); }
#endif
using Stored = Word;
struct Scales {};
__device__ __forceinline__ Scales scales_of(const int*, int, int) { return {}; }
__device__ __forceinline__ Stored stored(Word word, const Scales&) { return word; }
#endif

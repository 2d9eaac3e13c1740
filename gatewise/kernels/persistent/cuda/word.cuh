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

// The largest exponents of a word's columns.
using Scales = Exponents<BYTES / 4>;
__device__ __forceinline__ Scales scales_of(const int* columns, int word) { return ((const Scales*)columns)[word]; }

// The numbers of a word, from the largest exponents of the columns and of the row. The word is no reference, with which each of
// its numbers would take a load.
__device__ __forceinline__ Stored stored(Word word, const Scales& columns, int row) {
    Stored found;
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) found.at[i] = Float16::narrowed(Scale::of(TOP + row - columns.at[i])(word.at[i]));
    return found;
}
#else
#if BYTES == 2
using Word = unsigned short;
#elif BYTES == 4
using Word = unsigned int;
#elif BYTES == 8
using Word = uint2;
#else
using Word = uint4;
#endif
using Stored = Word;
struct Scales {};
__device__ __forceinline__ Scales scales_of(const int*, int) { return {}; }
__device__ __forceinline__ Stored stored(Word word, const Scales&, int) { return word; }
#endif

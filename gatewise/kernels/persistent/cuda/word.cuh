// The type that copies load and store: a word of BYTES, 2, 4, 8 or 16.
#pragma once
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

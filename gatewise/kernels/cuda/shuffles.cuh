// Exchanges of 16-bit values between neighbouring lanes of a warp.
#pragma once
#include "numbers.cuh"

constexpr u32 EVERY_LANE = 0xffffffffu;

// Transposes a 4 x 4 matrix of 16-bit values in four neighbouring lanes: lane j passes row j and receives column j.
__device__ __forceinline__ uint2 transposed(uint2 own) {
    const int lane = threadIdx.x & 31;
    const u32 far = __shfl_xor_sync(EVERY_LANE, (lane & 2) ? own.x : own.y, 2);
    const u32 first = (lane & 2) ? far : own.x, second = (lane & 2) ? own.y : far;
    const u32 low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
    const u32 near = __shfl_xor_sync(EVERY_LANE, (lane & 1) ? low : high, 1);
    const u32 even = (lane & 1) ? near : low, odd = (lane & 1) ? high : near;
    return make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
}

// The 16-bit values of two neighbouring lanes as one word, valid in the first of them.
__device__ __forceinline__ u32 paired(u32 own) { return own | __shfl_down_sync(EVERY_LANE, own, 1) << 16; }

// The word of another lane, as a number of the same bits.
__device__ __forceinline__ float bits_of_lane(u32 own, int lane) { return __shfl_sync(EVERY_LANE, __uint_as_float(own), lane); }

// Two neighbouring lanes pass (a0 a1)(a2 a3) each; the first one receives both a0 and both a1, the second one both a2 and
// both a3.
__device__ __forceinline__ uint2 paired(uint2 own) {
    const bool second = threadIdx.x & 1;
    const u32 other = __shfl_xor_sync(EVERY_LANE, second ? own.x : own.y, 1);
    const u32 low = second ? other : own.x, high = second ? own.y : other;
    return make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}

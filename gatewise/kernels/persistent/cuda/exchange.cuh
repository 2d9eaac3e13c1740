// How blocks pass values between steps without a barrier: the data is its own flag.
//
// A buffer is filled beforehand with words that no result can be (0xFFFFFFFF). Producers store, consumers load until no
// word is that pattern. Every slot is written once, so nothing needs a fence.
#pragma once
#include "numerics.cuh"

constexpr u32 UNWRITTEN = 0xffffffffu;

__device__ __forceinline__ uint4 load_exchanged(const u16* from) {
    uint4 words;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

// Stores two neighbouring values as the one word that consumers check.
__device__ __forceinline__ void store_exchanged(u16* to, u32 pair) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(pair) : "memory");
}

__device__ __forceinline__ bool is_unwritten(uint4 words) {
    return max(max(words.x, words.y), max(words.z, words.w)) == UNWRITTEN;
}

// Counts the polls of one wait; beyond the limit the wait is given up, so that a lost block can never hang the device. A
// block that gave up waits no more: what it reads is the pattern, a NaN, and so is all that follows from it.
struct Patience {
    u32 limit;
    u32 polls;
    bool lost;

    __device__ __forceinline__ bool is_left() {
        lost = lost || ++polls > limit;
        return !lost;
    }
};

// Transposes 16-bit values among four neighbouring lanes: lane j gives (a0 a1)(a2 a3) and gets value j of each lane.
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

// Of two neighbouring lanes that give (a0 a1)(a2 a3) each, the first gets its own and the other's a0, then their a1; the
// second their a2, then their a3.
__device__ __forceinline__ uint2 paired(uint2 own) {
    const bool second = threadIdx.x & 1;
    const u32 other = __shfl_xor_sync(EVERY_LANE, second ? own.x : own.y, 1);
    const u32 low = second ? other : own.x, high = second ? own.y : other;
    return make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}

// The exchange of values between blocks from step to step, without a barrier: the data is its own flag.
//
// A buffer is filled before the launch with a pattern that is never a result (0xFFFFFFFF). Producers store their values, and
// consumers load until no word is that pattern. Each word is written once, so no fence is needed.
//
// With MARKED, results never have the bit MARK, and every word that has it counts as not yet written: the buffer may then be
// the memory of kept gates.
#pragma once
#include "numerics.cuh"

constexpr u32 UNWRITTEN = 0xffffffffu;

__device__ __forceinline__ uint4 load_exchanged(const Value* from) {
    uint4 words;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

// Stores a word, which has one or two neighbouring values; consumers check it as a whole.
__device__ __forceinline__ void store_exchanged(Value* to, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Loads a single value.
__device__ __forceinline__ u32 load_exchanged_value(const Value* from) {
#if FLOAT32
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
#else
    u16 value;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
#endif
    return value;
}

__device__ __forceinline__ bool is_unwritten(uint4 words) {
#if MARKED
    return (words.x | words.y | words.z | words.w) & MARK;
#else
    return max(max(words.x, words.y), max(words.z, words.w)) == UNWRITTEN;
#endif
}

__device__ __forceinline__ bool is_unwritten(u32 value) { return (Value)value == (Value)UNWRITTEN; }

// Counts the polls of a wait. Beyond the limit the block gives up, so that a missing block can never hang the device. A block
// that gave up does not wait again: it reads the pattern, which is a NaN, and all its further results are NaN, too.
struct Patience {
    u32 limit;
    u32 polls;
    bool lost;

    __device__ __forceinline__ bool is_left() {
        lost = lost || ++polls > limit;
        return !lost;
    }
};

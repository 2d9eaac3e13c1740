// How blocks pass values between steps without a barrier: the data is its own flag.
//
// A buffer is filled beforehand with words that no result can be (0xFFFFFFFF). Producers store, consumers load until no
// word is that pattern. Every slot is written once, so nothing needs a fence.
//
// Where results never have MARK, any word that has it counts as not yet written (MARKED): the buffer may hold kept gates.
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

// Stores a word of one or two neighbouring values, which consumers check as one.
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

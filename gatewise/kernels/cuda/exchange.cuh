// The exchange of values between blocks from step to step, without a barrier: the data is its own flag.
//
// A buffer is filled before the launch with a pattern that is never a result (0xFFFFFFFF): results are canonical numbers.
// Producers store their values, and consumers load until no word is that pattern. Each word is written once, so no fence is
// needed.
//
// With MARKED, results never have the bit MARK, and every word that has it counts as not yet written: the buffer may then be
// the memory of kept gates.
#pragma once
#include "matrix.cuh"
#include "words.cuh"

constexpr u32 UNWRITTEN = 0xffffffffu;

// The last bit of numbers that are rounded to TF32 is unused. Kept gates have it set, so that the gradients of the gate sums can
// overwrite them one by one and be distinguished from them.
constexpr u32 MARK = SCALED ? 1u : 0u;

// A gate, rounded to the last bit but one, with the mark; and a word without the mark.
__device__ __forceinline__ u32 marked(u32 gate) { return (gate + (gate >> 1 & MARK)) | MARK; }
__device__ __forceinline__ u32 unmarked(u32 word) { return word & ~MARK; }

__device__ __forceinline__ uint4 load_exchanged(const Value* from) {
    uint4 words;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

__device__ __forceinline__ uint2 load_exchanged_word_pair(const Value* from) {
    uint2 words;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(from) : "memory");
    return words;
}

// Loads a single value.
__device__ __forceinline__ u32 load_exchanged_value(const Value* from) {
#if VALUE_BYTES == 4
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
#else
    u16 value;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(value) : "l"(from) : "memory");
#endif
    return value;
}

// Stores a word, which has one or two neighbouring values; consumers check it as a whole.
__device__ __forceinline__ void store_exchanged(Value* to, u32 word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Stores it if `wanted`, without a branch.
__device__ __forceinline__ void store_exchanged_if(bool wanted, Value* to, u32 word) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p st.relaxed.gpu.global.u32 [%0], %1;\n\t}" ::"l"(to), "r"(word), "r"((int)wanted) : "memory");
}

__device__ __forceinline__ void store_exchanged(Value* to, uint2 words) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
}

__device__ __forceinline__ bool is_unwritten(uint4 words) {
#if MARKED
    return (words.x | words.y | words.z | words.w) & MARK;
#else
    return max(max(words.x, words.y), max(words.z, words.w)) == UNWRITTEN;
#endif
}

__device__ __forceinline__ bool is_unwritten(uint2 words) { return max(words.x, words.y) == UNWRITTEN; }
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

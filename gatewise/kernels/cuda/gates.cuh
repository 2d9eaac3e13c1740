// The values of a cell in memory: hidden states [B, H], and gates [B, 4H] with the four gates of a unit H values apart.
//
// Four neighbouring lanes compute four neighbouring units of a row. The functions here load and store whole words and
// exchange values between these lanes, so that the passes need not know the size of a value.
//
// The type `Kept`, a vector of four numbers, is defined before this file is included.
#pragma once
#include "exchange.cuh"
#include "memory.cuh"
#include "shuffles.cuh"
#include "words.cuh"

using Gates = Kept;            // four numbers of a unit: gate sums, kept gates, or gradients
using FourGates = FourValues;  // the words of four gates: of one unit, or of one gate of four units

// The functions ending in `_if` load, store or prefetch if `wanted`; a value that is not loaded is zero. In 16 bits they have no
// branch: with branches around the loads of its cells, a thread waits longer than for the loads. In float32, with branches
// around all of them, they are always wanted.
#if VALUE_BYTES == 4
constexpr bool BRANCHES = true;

__device__ __forceinline__ u32 load_if(bool, const Value* at) { return *at; }

// The index at which a lane loads and stores the gates of a cell in a tensor [B, 4H].
__device__ __forceinline__ u32 gates_place(int row, int unit) { return row * 4 * HIDDEN + unit; }

__device__ __forceinline__ FourGates load_gates(const Value* at) {
    return make_uint4(at[0], at[HIDDEN], at[2 * HIDDEN], at[3 * HIDDEN]);
}

__device__ __forceinline__ FourGates load_gates_if(bool, const Value* at) { return load_gates(at); }

__device__ __forceinline__ void store_gates(Value* at, FourGates gates) {
    at[0] = gates.x, at[HIDDEN] = gates.y, at[2 * HIDDEN] = gates.z, at[3 * HIDDEN] = gates.w;
}

__device__ __forceinline__ void prefetch_gates(const Value* at) {
    prefetch(at), prefetch(at + HIDDEN), prefetch(at + 2 * HIDDEN), prefetch(at + 3 * HIDDEN);
}
__device__ __forceinline__ void prefetch_gates_if(bool, int, const Value* at) { prefetch_gates(at); }
__device__ __forceinline__ void prefetch_value_if(bool, int, const Value* at) { prefetch(at); }

// The same for gates that other blocks wait for.
__device__ __forceinline__ FourGates load_gates_exchanged(const Value* at) {
    return make_uint4(load_exchanged_value(at), load_exchanged_value(at + HIDDEN), load_exchanged_value(at + 2 * HIDDEN), load_exchanged_value(at + 3 * HIDDEN));
}

__device__ __forceinline__ void store_gates_exchanged(Value* at, FourGates gates) {
    store_exchanged(at, gates.x), store_exchanged(at + HIDDEN, gates.y);
    store_exchanged(at + 2 * HIDDEN, gates.z), store_exchanged(at + 3 * HIDDEN, gates.w);
}

// From the words that a lane loads to the gates of its cell, and back to the words that it stores.
__device__ __forceinline__ FourGates gathered(FourGates loaded) {
#if MARKED
    return make_uint4(unmarked(loaded.x), unmarked(loaded.y), unmarked(loaded.z), unmarked(loaded.w));
#else
    return loaded;
#endif
}
__device__ __forceinline__ FourGates scattered(Gates gates) {
    auto word = [](float gate) { return marked(canonical(gate)); };
    return make_uint4(word(gates.x), word(gates.y), word(gates.z), word(gates.w));
}

__device__ __forceinline__ Gates widened(FourGates gates) {
    return {widened(gates.x), widened(gates.y), widened(gates.z), widened(gates.w)};
}

// The word with a lane's hidden state that other blocks read; only lanes whose index is a multiple of VALUES_PER_WORD store it.
__device__ __forceinline__ u32 exchanged(float value, bool active) { return active ? canonical(value) : 0u; }
__device__ __forceinline__ Value own_value(u32 word) { return word; }

// The words with the gradients of a cell's gates that other blocks read, rounded as all products round them.
__device__ __forceinline__ FourGates exchanged(Gates grad, bool active) {
    auto word = [&](float value) { return active ? unmarked(canonical(widened(rounded(Number::to_bits(value))))) : 0u; };
    return make_uint4(word(grad.x), word(grad.y), word(grad.z), word(grad.w));
}

__device__ __forceinline__ void store_exchanged_gates(Value* plane, int row, int unit, FourGates words) {
    Value* const to = plane + (u32)(row * 4 * HIDDEN + unit);
    store_exchanged(to, words.x), store_exchanged(to + HIDDEN, words.y);
    store_exchanged(to + 2 * HIDDEN, words.z), store_exchanged(to + 3 * HIDDEN, words.w);
}
__device__ __forceinline__ void store_exchanged_gates_if(bool, Value* plane, int row, int unit, FourGates words) {
    store_exchanged_gates(plane, row, unit, words);
}

// Replaces the gate sums in four words, one word for each gate, by what a function returns for the sums of a unit and its index
// in the word.
template <class Function>
__device__ __forceinline__ void replace_gates(u32& x, u32& y, u32& z, u32& w, Function function) {
    const Gates found = function({widened(x), widened(y), widened(z), widened(w)}, 0);
    x = marked(canonical(found.x)), y = marked(canonical(found.y));
    z = marked(canonical(found.z)), w = marked(canonical(found.w));
}

#else
constexpr bool BRANCHES = false;

__device__ __forceinline__ u32 load_if(bool wanted, const Value* at) {
    u16 value = 0;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p ld.global.u16 %0, [%1];\n\t}" : "+h"(value) : "l"(at), "r"((int)wanted));
    return value;
}

// The index at which a lane loads and stores in a tensor [B, 4H]: lane j of four has gate j of their four units.
__device__ __forceinline__ u32 gates_place(int row, int unit) {
    return row * 4 * HIDDEN + (threadIdx.x & 3) * HIDDEN + (unit & ~3);
}

__device__ __forceinline__ FourGates load_gates(const Value* at) { return *(const uint2*)at; }
__device__ __forceinline__ FourGates load_gates_if(bool wanted, const Value* at) {
    uint2 words = {0, 0};
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\t@p ld.global.v2.u32 {%0,%1}, [%2];\n\t}" : "+r"(words.x), "+r"(words.y) : "l"(at), "r"((int)wanted));
    return words;
}
__device__ __forceinline__ void store_gates(Value* at, FourGates gates) { *(uint2*)at = gates; }
__device__ __forceinline__ void store_gates_if(bool wanted, Value* at, FourGates gates) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\t@p st.global.v2.u32 [%0], {%1,%2};\n\t}" ::"l"(at), "r"(gates.x), "r"(gates.y), "r"((int)wanted) : "memory");
}
__device__ __forceinline__ void store_value_if(bool wanted, Value* at, Value value) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t@p st.global.u16 [%0], %1;\n\t}" ::"l"(at), "h"(value), "r"((int)wanted) : "memory");
}
__device__ __forceinline__ void prefetch_gates(const Value* at) { prefetch(at); }

// Of the units whose values share a sector of the cache, which has 32 bytes, only the first ones prefetch it.
__device__ __forceinline__ void prefetch_gates_if(bool wanted, int unit, const Value* at) { prefetch_if(wanted && unit % 16 < 4, at); }
__device__ __forceinline__ void prefetch_value_if(bool wanted, int unit, const Value* at) { prefetch_if(wanted && unit % 16 == 0, at); }

// The same for gates that other blocks wait for.
__device__ __forceinline__ FourGates load_gates_exchanged(const Value* at) { return load_exchanged_word_pair(at); }
__device__ __forceinline__ void store_gates_exchanged(Value* at, FourGates gates) { store_exchanged(at, gates); }

// From the words that a lane loads to the gates of its cell, and back to the words that it stores.
__device__ __forceinline__ FourGates gathered(FourGates loaded) { return transposed(loaded); }
__device__ __forceinline__ FourGates narrowed(Gates gates) {
    return {Number::pair(gates.x, gates.y), Number::pair(gates.z, gates.w)};
}
__device__ __forceinline__ FourGates scattered(Gates gates) { return transposed(narrowed(gates)); }

__device__ __forceinline__ Gates widened(FourGates gates) {
    return {Number::low(gates.x), Number::high(gates.x), Number::low(gates.y), Number::high(gates.y)};
}

// The word with a lane's hidden state that other blocks read; only lanes whose index is a multiple of VALUES_PER_WORD store it.
__device__ __forceinline__ u32 exchanged(float value, bool active) { return paired(active ? canonical(value) : 0u); }
__device__ __forceinline__ Value own_value(u32 word) { return (Value)word; }

// The words with the gradients of a cell's gates that other blocks read.
__device__ __forceinline__ FourGates exchanged(Gates grad, bool active) {
    return paired(active ? narrowed(grad) : four_zeros());
}

// The first of two neighbouring lanes stores the first two gates of both units, the second one the last two.
__device__ __forceinline__ void store_exchanged_gates(Value* plane, int row, int unit, FourGates words) {
    Value* const to = plane + (u32)(row * 4 * HIDDEN + (threadIdx.x & 1) * 2 * HIDDEN + (unit & ~1));
    store_exchanged(to, words.x);
    store_exchanged(to + HIDDEN, words.y);
}
__device__ __forceinline__ void store_exchanged_gates_if(bool wanted, Value* plane, int row, int unit, FourGates words) {
    Value* const to = plane + (u32)(row * 4 * HIDDEN + (threadIdx.x & 1) * 2 * HIDDEN + (unit & ~1));
    store_exchanged_if(wanted, to, words.x);
    store_exchanged_if(wanted, to + HIDDEN, words.y);
}

// Replaces the gate sums in four words, one word for each gate, by what a function returns for the sums of a unit and its index
// in the word.
template <class Function>
__device__ __forceinline__ void replace_gates(u32& x, u32& y, u32& z, u32& w, Function function) {
    const Gates low = function({Number::low(x), Number::low(y), Number::low(z), Number::low(w)}, 0);
    const Gates high = function({Number::high(x), Number::high(y), Number::high(z), Number::high(w)}, 1);
    x = Number::pair(low.x, high.x), y = Number::pair(low.y, high.y);
    z = Number::pair(low.z, high.z), w = Number::pair(low.w, high.w);
}

#endif

// Prefetches, predicated loads, asynchronous copies to shared memory, and a barrier for the compiler.
#pragma once
#include "numbers.cuh"

// Prefetches values into the second-level cache; and does so if `wanted`, without a branch.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
__device__ __forceinline__ void prefetch_if(bool wanted, const void* at) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %1, 0;\n\t@p prefetch.global.L2 [%0];\n\t}" ::"l"(at), "r"((int)wanted));
}

// Loads 16 bytes of a row with `size` elements from element k on; zeros after its end, and if not `exists`. With a branch, the
// compiler would wait for each load before the next one.
template <class Element>
__device__ __forceinline__ uint4 load_within(const Element* row, int k, int size, bool exists) {
    u32 words[4] = {0, 0, 0, 0};
    asm("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\t@p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n\t}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(row + k), "r"((int)(exists && k < size)));
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Loads 16 bytes from an address in shared memory.
__device__ __forceinline__ uint4 load_shared(u32 from) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(from) : "memory");
    return words;
}

// Begins to copy 16 bytes to an address in shared memory, or zeros if not `exists`.
__device__ __forceinline__ void begin_copy(u32 to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

// The same for BYTES (4, 8 or 16).
template <int BYTES>
__device__ __forceinline__ void begin_copy(char* to, const void* from, bool exists) {
    if constexpr (BYTES == 16) {
        begin_copy(shared_address(to), from, exists);
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(exists ? BYTES : 0) : "memory");
    }
}

// Ends a group of copies; and waits until all but the last LATER groups have arrived.
__device__ __forceinline__ void end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Makes the compiler compute anew what depends on a value, because results that were computed before would not fit in
// registers.
template <class Type>
__device__ __forceinline__ void forget_results_of(Type& value) {
    asm volatile("" : "+r"(value));
}

// Makes the compiler add constants to an address of global memory, instead of keeping each sum in registers of its own.
template <class Type>
__device__ __forceinline__ Type* common_address(Type* pointer) {
    asm("// common" : "+l"(pointer));
    return pointer;
}

// Makes the compiler keep an address of global memory in registers instead of loading it from the arguments of the kernel again.
template <class Type>
__device__ __forceinline__ Type* kept_pointer(Type* pointer) {
    asm volatile("// kept" : "+l"(pointer));
    __builtin_assume(__isGlobal(pointer));  // otherwise loads would first look up the kind of memory
    return pointer;
}

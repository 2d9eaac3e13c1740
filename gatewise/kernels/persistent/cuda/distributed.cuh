// The recurrent product of a layer whose blocks, BLOCKS for a group of batch rows, are one cluster: they exchange values through
// distributed shared memory, which takes less time than the second-level cache. 16-bit formats only.
//
// Each store signals its own arrival (cluster.cuh), so no value is polled, and nothing outside of the cluster is waited for. Two
// buffers with barriers of their own take turns: a block sends the values of a step only after those of the step before have
// arrived from all blocks, which sent them after they had read those of the step before that. The phases of the barriers follow
// from the number of the step, so that a cluster computes a single group of batch rows.
#pragma once
#include "cluster.cuh"
#include "factors.cuh"

static_assert(UNITS == 32 && SPLIT == 1, "a lane for each unit of a block");
static_assert(WARPS == 8, "two tiles of gates, and half of the depth, for each warp of the forward pass");
static_assert(!STACKED, "layers in pairs exchange values with blocks of other clusters");

constexpr int SPAN = 32;                        // the values that four lanes load, 16 bytes each
constexpr int UNITS_OF_ALL = BLOCKS * UNITS;    // the hidden units of all blocks, of which the last have weights of zero
constexpr int GROUPS_OF_EIGHT = ROWS / 8;            // groups of eight batch rows, the width of a tensor-core tile
constexpr int PARTS = 2;                        // the sums of each value in the forward pass
constexpr int PARTIAL_STRIDE = TILES * 16 + 4;  // in floats; the padding avoids bank conflicts of stores
constexpr int PARTIAL_FLOATS = ROWS * PARTIAL_STRIDE;

// The bytes of a row in shared memory whose values lanes load as spans, without bank conflicts.
__device__ __forceinline__ constexpr int pitch_of(int values) { return values * 2 % 128 ? values * 2 : values * 2 + 64; }

__device__ __forceinline__ int own_warp() { return threadIdx.x >> 5; }
__device__ __forceinline__ int own_part() { return own_warp() >> 2; }

// An address in shared memory that the compiler keeps in a register. It would compute the address anew in every step, for which it
// reads a special register.
__device__ __forceinline__ u32 kept_address(u32 address) {
    forget_results_of(address);
    return address;
}

// The sums of a lane in a tile, in two parts, so that not every product waits for the one before it.
struct Sums {
    float even[4], odd[4];

    // Adds the products of two neighbouring fragments of weights and a lane's values of a span.
    __device__ __forceinline__ void add(const u32 (&first)[4], const u32 (&second)[4], uint4 words) {
        multiply<Factor>(even, first, words.x, words.y);
        multiply<Factor>(odd, second, words.z, words.w);
    }
    __device__ __forceinline__ float total(int i) const { return even[i] + odd[i]; }
};

// The barriers of steps with even and with odd numbers.
struct Arrivals {
    u32 even, odd;

    __device__ __forceinline__ Arrivals(u64* even, u64* odd) : even(kept_address(shared_address(even))), odd(kept_address(shared_address(odd))) {}
    __device__ __forceinline__ u32 of(int step) const { return step & 1 ? odd : even; }
    // This wait has no limit: the blocks of a cluster run at the same time, and send in every step.
    __device__ __forceinline__ void await(int step) const {
        while (!has_arrived(of(step), step >> 1 & 1)) {}
    }
};

// The distance from an address in shared memory to the same one in another block. It is that of every other address, too, also
// of a barrier.
__device__ __forceinline__ u32 distance_to(u32 address, u32 block) { return kept_address(address_in(address, block) - address); }

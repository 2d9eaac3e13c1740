// The recurrent product of the backward pass in a cluster: a block multiplies the gradients of its own gate sums, which it has in
// shared memory, for the units of all blocks, and sends each block the sums of that block's units. A warp multiplies for one
// block, or, with more blocks than warps, for several.
#pragma once
#include "distributed.cuh"

constexpr int OWN_GATES = 4 * UNITS;                     // the depth of a block; the four gates of a unit are neighbours
constexpr int GRADIENT_SPANS = OWN_GATES / SPAN;
constexpr int GRADIENT_PITCH = pitch_of(OWN_GATES);
constexpr int GRADIENT_BYTES = ROWS * GRADIENT_PITCH;    // of one of two buffers
constexpr int OF_WARP = (BLOCKS + WARPS - 1) / WARPS;    // blocks for which a warp multiplies
constexpr int INBOX_FLOATS = BLOCKS * ROWS * UNITS;      // the sums that a block receives in a step
constexpr int STAGED_PITCH = UNITS_OF_ALL * 2 + 16;      // bytes of a row of weights until they are turned
constexpr int DISTRIBUTED_BYTES = 2 * INBOX_FLOATS * 4 + 2 * GRADIENT_BYTES;
constexpr int STAGED_BYTES = OWN_GATES * STAGED_PITCH;
static_assert((DISTRIBUTED_BYTES > STAGED_BYTES ? DISTRIBUTED_BYTES : STAGED_BYTES) == SHARED_BYTES, "the same as in tiling.py");

struct Weights {
    u32 held[OF_WARP][2][GRADIENT_SPANS * 2][4];  // for each block two tiles of 16 units
};

// Loads all weights, through the whole shared memory, which is free after the next barrier. `row_of(gate, unit)` returns the
// address of the block's row of weights, or null for zeros.
template <class RowOf>
__device__ __forceinline__ void load_weights(Weights& weights, char* shared, RowOf row_of) {
    constexpr int CHUNKS = UNITS_OF_ALL / 8;
#pragma unroll 4
    for (int item = threadIdx.x; item < OWN_GATES * CHUNKS; item += THREADS) {
        const int own = item / CHUNKS, unit = item % CHUNKS * 8;
        const Value* const from = row_of(own / UNITS, own % UNITS);
        *(uint4*)(shared + own * STAGED_PITCH + unit * 2) = load_weight_words(from, unit, from != nullptr);
    }
    __syncthreads();
    // A lane passes the address of a row of one of four 8 x 8 matrices: of two gates of every other of eight units, for the first
    // or the last half of a tile's units. The other units are those of the second half of the span.
    const int lane = threadIdx.x & 31, matrix = lane >> 3, place = lane & 7;
    const int gate = matrix / 2 * 2 + (place & 1), unit = place / 2 * 2;
#pragma unroll
    for (int own = 0; own < OF_WARP; ++own)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int product = 0; product < GRADIENT_SPANS * 2; ++product) {
                const int block = own_warp() + own * WARPS;
                const int row = gate * UNITS + product / 2 * 8 + unit + product % 2;
                const int column = (block < BLOCKS ? block : 0) * UNITS + tile * 16 + matrix % 2 * 8;
                const uint4 turned = load_transposed_matrices(shared + row * STAGED_PITCH + column * 2);
                u32(&held)[4] = weights.held[own][tile][product];
                held[0] = turned.x, held[1] = turned.y, held[2] = turned.z, held[3] = turned.w;
            }
}

// Makes the gradients that a warp keeps visible to the others.
__device__ __forceinline__ void make_visible() { __syncthreads(); }

struct Gradients {
    char* shared;  // [2, BLOCKS, ROWS, UNITS] floats: the sums that arrive; then two buffers of gradients
    u32 memory;    // its address
    u32 own;       // the place of the lane's sums in an inbox
    u32 distances[OF_WARP];  // to the blocks that the warp sends to
    Arrivals arrivals;

    __device__ __forceinline__ Gradients(void* memory_of_block, Arrivals arrivals)
        : shared((char*)memory_of_block), memory(kept_address(shared_address(memory_of_block))), arrivals(arrivals) {
        const u32 lane = threadIdx.x & 31;
        own = (cluster_rank() * ROWS * UNITS + 2 * (lane & 3) * UNITS + (lane >> 2) * 4) * 4;
#pragma unroll
        for (int turn = 0; turn < OF_WARP; ++turn) distances[turn] = distance_to(memory, min(own_warp() + turn * WARPS, BLOCKS - 1));
    }

    // The places of a step's gradients, and of the sums that were sent in it.
    __device__ __forceinline__ static u32 kept(int step) { return 2 * INBOX_FLOATS * 4 + (step & 1) * GRADIENT_BYTES; }
    __device__ __forceinline__ static u32 inbox(int step) { return (step & 1) * INBOX_FLOATS * 4; }

    // Keeps the gradients of a unit's gate sums at a step.
    __device__ __forceinline__ void keep(int step, int row, int unit, uint2 gates) const {
        *(uint2*)(shared + kept(step) + row * GRADIENT_PITCH + unit * 8) = gates;
    }

    // Multiplies the gradients of a step with the weights, and sends all blocks their sums.
    __device__ __forceinline__ void multiply(int step, const Weights& weights) const {
        const int lane = threadIdx.x & 31;
        const u32 from = memory + kept(step) + (lane >> 2) * GRADIENT_PITCH + (lane & 3) * 16;
#pragma unroll
        for (int turn = 0; turn < OF_WARP; ++turn) {
            if (turn * WARPS + WARPS > BLOCKS && own_warp() + turn * WARPS >= BLOCKS) break;
            Sums sums[GROUPS_OF_EIGHT][2] = {};
#pragma unroll
            for (int span = 0; span < GRADIENT_SPANS; ++span)
#pragma unroll
                for (int group = 0; group < GROUPS_OF_EIGHT; ++group) {
                    const uint4 words = load_shared(from + group * 8 * GRADIENT_PITCH + span * SPAN * 2);
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile)
                        sums[group][tile].add(weights.held[turn][tile][2 * span], weights.held[turn][tile][2 * span + 1], words);
                }
            // A lane has the sums of four units, eight apart, of two batch rows.
            const u32 to = memory + inbox(step) + own + distances[turn];
#pragma unroll
            for (int group = 0; group < GROUPS_OF_EIGHT; ++group)
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const Sums &low = sums[group][0], &high = sums[group][1];
                    const float4 four = {low.total(row), low.total(2 + row), high.total(row), high.total(2 + row)};
                    send(to + (group * 8 + row) * UNITS * 4, four, arrivals.of(step) + distances[turn]);
                }
        }
        if (threadIdx.x == 0) expect_bytes(arrivals.of(step), INBOX_FLOATS * 4);
    }

    // The sum over all blocks for a unit of a batch row, after those that were sent in a step have arrived.
    __device__ __forceinline__ float received(int step, int row, int unit) const {
        const float* const first = (const float*)(shared + inbox(step)) + row * UNITS + unit % 8 * 4 + unit / 8;
        float sums[4] = {};
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) sums[block % 4] += first[block * ROWS * UNITS];
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

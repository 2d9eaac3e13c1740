// The recurrent product of the forward pass in a cluster, and the hidden states that it reads: each block has those of all units
// in shared memory, where every block sends its own. A warp multiplies two tiles of 16 rows of weights over half of the depth.
#pragma once
#include "distributed.cuh"

static_assert(BLOCKS <= 8, "each of eight lanes sends to one block");
constexpr int SPANS_OF_DEPTH = UNITS_OF_ALL / SPAN;
constexpr int SPANS_OF_WARP = (SPANS_OF_DEPTH + 1) / 2;
constexpr int STATE_PITCH = pitch_of(UNITS_OF_ALL);
constexpr int STATE_BYTES = ROWS * STATE_PITCH;  // of one of two buffers
static_assert(2 * PARTS * PARTIAL_FLOATS * 4 + 2 * STATE_BYTES == SHARED_BYTES, "the same as in tiling.py");

struct Weights {
    u32 held[2][SPANS_OF_WARP * 2][4];
};

__device__ __forceinline__ int first_span() { return own_part() * SPANS_OF_WARP; }
__device__ __forceinline__ int first_tile() { return own_warp() % 4 * 2; }

// The index along the depth of the first value of a lane's 16 bytes of a row of weights, in a span of its warp.
__device__ __forceinline__ int depth_of(int span) { return (first_span() + span) * SPAN + (threadIdx.x & 3) * 8; }

// Loads all weights, as in product.cuh.
template <class PairAt>
__device__ __forceinline__ void load_weights(Weights& weights, PairAt pair_at) {
#pragma unroll
    for (int span = 0; span < SPANS_OF_WARP; ++span)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const Pair pair = pair_at(first_tile() + tile, span);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32(&held)[4] = weights.held[tile][2 * span + half];
                held[0] = pair.half[half].x, held[1] = pair.half[half].y, held[2] = pair.half[half].z, held[3] = pair.half[half].w;
            }
        }
}

struct States {
    u32 memory;  // the address of both buffers in shared memory
    u32 own;     // the place of the lane's eight units in a row
    u32 distance;  // to the block that the lane sends to
    Arrivals arrivals;

    __device__ __forceinline__ States(const void* shared, Arrivals arrivals) : memory(kept_address(shared_address(shared))), arrivals(arrivals) {
        own = (cluster_rank() * UNITS + (threadIdx.x & 24)) * 2;
        distance = distance_to(memory, min((int)(threadIdx.x & 7), BLOCKS - 1));
    }

    // The place of the states after a step; those before the first step are the states after step -1.
    __device__ __forceinline__ static u32 after(int step) { return (step & 1) * STATE_BYTES; }

    // Loads the states before the first step, which are visible after the next barrier. `row_of(row)` returns the address of a
    // batch row of h0, or null for zeros.
    template <class RowOf>
    __device__ __forceinline__ void start(void* shared, RowOf row_of) const {
        constexpr int CHUNKS = UNITS_OF_ALL / 8;
        for (int item = threadIdx.x; item < ROWS * CHUNKS; item += THREADS) {
            const int row = item / CHUNKS, unit = item % CHUNKS * 8;
            const Value* const from = row_of(row);
            *(uint4*)((char*)shared + after(-1) + row * STATE_PITCH + unit * 2) = load_within(from, unit, HIDDEN, from != nullptr);
        }
    }

    // The bytes that all blocks send in a step, once for each step.
    __device__ __forceinline__ void expect(int step) const {
        if (threadIdx.x == 0) expect_bytes(arrivals.of(step), ROWS * UNITS_OF_ALL * 2);
    }

    // Sends the states of the warp's units of a batch row, as words of two units in every other lane, to all blocks if `wanted`.
    // Eight lanes have those of eight units, and send them to eight blocks.
    __device__ __forceinline__ void send_row(int step, int row, u32 word, bool wanted) const {
        const int lane = threadIdx.x & 31;
        const int first = lane & 24;
        const float4 eight = {bits_of_lane(word, first), bits_of_lane(word, first + 2), bits_of_lane(word, first + 4), bits_of_lane(word, first + 6)};
        const u32 to = memory + after(step) + row * STATE_PITCH + own;
        if (wanted && (lane & 7) < BLOCKS) send(to + distance, eight, arrivals.of(step) + distance);
    }

    // Multiplies the weights with the states before a step; the sums go to `partial`, in shared memory.
    __device__ __forceinline__ void multiply_before(int step, const Weights& weights, float* partial) const {
        const int row = (threadIdx.x & 31) >> 2, pair = threadIdx.x & 3;
        const u32 from = memory + after(step - 1) + row * STATE_PITCH + pair * 16;
        Sums sums[GROUPS_OF_EIGHT][2] = {};
#pragma unroll
        for (int span = 0; span < SPANS_OF_WARP; ++span)
#pragma unroll
            for (int group = 0; group < GROUPS_OF_EIGHT; ++group) {
                // The last span of the second half may be beyond the depth. Its weights are zeros, but a state may be infinite.
                const bool exists = SPANS_OF_DEPTH % 2 == 0 || first_span() + span < SPANS_OF_DEPTH;
                const uint4 words = exists ? load_shared(from + group * 8 * STATE_PITCH + (first_span() + span) * SPAN * 2) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) sums[group][tile].add(weights.held[tile][2 * span], weights.held[tile][2 * span + 1], words);
            }
        float* out = partial + 2 * pair * PARTIAL_STRIDE + first_tile() * 16 + row;
#pragma unroll
        for (int group = 0; group < GROUPS_OF_EIGHT; ++group, out += 8 * PARTIAL_STRIDE)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const Sums& own = sums[group][tile];
                out[tile * 16] = own.total(0), out[tile * 16 + PARTIAL_STRIDE] = own.total(1);
                out[tile * 16 + 8] = own.total(2), out[tile * 16 + 8 + PARTIAL_STRIDE] = own.total(3);
            }
    }
};

// The recurrent product of one step: weights in registers, the other operand polled from the exchange.
//
// A block multiplies TILES x 16 weight rows with ROWS batch rows over a depth of WIDTH. Its warps split the depth: warp w
// takes SPANS spans of SPAN values from w * SPANS * SPAN, for every weight row, and leaves a partial sum in shared memory.
// The order of the depth is free, so each lane's fragment is 16 contiguous bytes of a row: no staging.
#pragma once
#include "exchange.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int NEIGHBOURS = ROWS / 8;                   // groups of eight batch rows, one tensor-core tile wide each
constexpr int PARTIAL_STRIDE = TILES * 16 + 4;         // floats; the padding keeps stores free of bank conflicts
constexpr int PARTIAL_FLOATS = ROWS * PARTIAL_STRIDE;  // of one warp
constexpr int POLLS = (SPANS + CHUNK - 1) / CHUNK;     // polls for one group of eight rows, CHUNK spans each
constexpr int ITEMS = NEIGHBOURS * POLLS;
constexpr int AHEAD = DEPTH < ITEMS ? DEPTH : ITEMS;   // polls in flight

constexpr int LENT = TILES - RESIDENT;                 // tiles whose weights do not fit in registers: in shared memory
constexpr int LENT_WORDS = WARPS * LENT * SPANS * 2 * 32;  // of 16 bytes

// A lane's weights: RESIDENT tiles in registers, the others at `lent`, which is its own share of shared memory.
struct Weights {
    u32 held[RESIDENT][SPANS * 2][4];
    const uint4* lent;
};

// Where a lane's batch row comes from in this step: from the exchange, which is polled, or from memory that is taken as it
// is, because it was finished before the launch or because nothing that comes of it is used. What counts was made by
// `narrowed`, or is as if it were.
struct Row {
    const Value* data;
    bool polled;
};

// The first value of a lane's 16 bytes in span `span` of its warp.
__device__ __forceinline__ int depth_of(int span) {
    return ((threadIdx.x >> 5) * SPANS + span) * SPAN + (threadIdx.x & 3) * (SPAN / 4);
}

// The batch row that a lane loads in a group of eight; ONE_ROW is loaded by every eighth lane.
__device__ __forceinline__ int row_of_lane(int group) { return ONE_ROW ? 0 : group * 8 + ((threadIdx.x & 31) >> 2); }

// A lane's weights of one tile in one span: its fragments for two tensor-core products.
struct Pair {
    uint4 half[2];
};

__device__ __forceinline__ uint4 rounded(uint4 words) {
    return make_uint4(rounded(words.x), rounded(words.y), rounded(words.z), rounded(words.w));
}

// Loads 16 bytes of weights, `left` of whose values exist; rows of sizes that are no multiple of 16 bytes begin anywhere.
__device__ __forceinline__ uint4 load_weight_words(const Value* from, int left) {
    if (((size_t)from & 15) == 0 && left >= SPAN / 4) return *(const uint4*)from;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if FLOAT32
        words[i] = i < left ? from[i] : 0u;
#else
        words[i] = (2 * i < left ? from[2 * i] : 0u) | (2 * i + 1 < left ? (u32)from[2 * i + 1] << 16 : 0u);
#endif
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Loads the weights once, `pair_at(tile, span)` by pair; `room` has LENT_WORDS.
template <class PairAt>
__device__ __forceinline__ void load_weights(Weights& weights, uint4* room, PairAt pair_at) {
    room += (threadIdx.x >> 5) * LENT * SPANS * 2 * 32 + (threadIdx.x & 31);
    weights.lent = room;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int span = 0; span < SPANS; ++span) {
            const Pair pair = pair_at(tile, span);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 fragment = rounded(pair.half[half]);
                if (tile < RESIDENT) {
                    u32(&held)[4] = weights.held[tile < RESIDENT ? tile : 0][span * 2 + half];
                    held[0] = fragment.x, held[1] = fragment.y, held[2] = fragment.z, held[3] = fragment.w;
                } else {
                    room[((tile - RESIDENT) * SPANS * 2 + span * 2 + half) * 32] = fragment;
                }
            }
        }
}

__device__ __forceinline__ void multiply_tile(float (&sum)[4], const Weights& weights, int tile, int half, u32 b0, u32 b1) {
    u32 fragment[4];
    if (tile < RESIDENT) {
        const u32(&held)[4] = weights.held[tile < RESIDENT ? tile : 0][half];
        fragment[0] = held[0], fragment[1] = held[1], fragment[2] = held[2], fragment[3] = held[3];
    } else {
        const uint4 lent = weights.lent[((tile - RESIDENT) * SPANS * 2 + half) * 32];
        fragment[0] = lent.x, fragment[1] = lent.y, fragment[2] = lent.z, fragment[3] = lent.w;
    }
#if ONE_ROW
    // Of one row, a lane adds what it loaded of the depth to two sums: of weight rows lane / 4 and the eighth after it.
    sum[0] = fmaf(widened(fragment[0]), widened(b0), sum[0]), sum[1] = fmaf(widened(fragment[1]), widened(b0), sum[1]);
    sum[0] = fmaf(widened(fragment[2]), widened(b1), sum[0]), sum[1] = fmaf(widened(fragment[3]), widened(b1), sum[1]);
#else
    multiply(sum, fragment, b0, b1);
#endif
}

__device__ __forceinline__ void load_item(uint4 (&words)[CHUNK], Row row, int poll) {
#pragma unroll
    for (int c = 0; c < CHUNK; ++c) {
        const int span = poll * CHUNK + c, k = depth_of(span);
        words[c] = span < SPANS && (WARPS * SPANS * SPAN <= WIDTH || k < WIDTH) ? load_exchanged(row.data + k) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ bool is_missing(const uint4 (&words)[CHUNK], Row row) {
    bool missing = false;
#pragma unroll
    for (int c = 0; c < CHUNK; ++c) missing |= is_unwritten(words[c]);
    return __any_sync(EVERY_LANE, missing && row.polled);
}

__device__ __forceinline__ void await_item(uint4 (&words)[CHUNK], Row row, int poll, Patience& patience) {
    while (is_missing(words, row) && patience.is_left()) load_item(words, row, poll);
}

#if ADDED_TO_ROUND
// Rounds to nearest what `narrowed` made, as the tensor core reads no bit below the last that counts. The pattern stays what
// it is where a wait was given up: the sum would be a number.
__device__ __forceinline__ uint4 rounded_narrowed(uint4 words, bool lost) {
    const u32 half = lost ? 0u : ADDED_TO_ROUND;
    return make_uint4(words.x + half, words.y + half, words.z + half, words.w + half);
}
#endif

using InFlight = uint4[AHEAD][CHUNK];

// Issues the first loads of a step, at the end of the step before: sooner they would only find what is not there yet, and
// keep L2 busy. `row_of(row)` says where a batch row of the block comes from.
template <class RowOf>
__device__ __forceinline__ void begin_product(InFlight& words, RowOf row_of) {
#pragma unroll
    for (int item = 0; item < AHEAD; ++item)
        load_item(words[item], row_of(row_of_lane(item / POLLS)), item % POLLS);
}

// Multiplies what has arrived, polls for the rest; `partial` is this warp's share of shared memory.
template <class RowOf>
__device__ __forceinline__ void finish_product(InFlight& words, const Weights& weights, RowOf row_of, float* partial, Patience& patience) {
    const int row = (threadIdx.x & 31) >> 2, pair = threadIdx.x & 3;
    float sum[TILES][4];
    patience.polls = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int group = item / POLLS, poll = item % POLLS;
        uint4(&here)[CHUNK] = words[item % AHEAD];
        await_item(here, row_of(row_of_lane(group)), poll, patience);
#if ADDED_TO_ROUND
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) here[c] = rounded_narrowed(here[c], patience.lost);
#endif
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            const int span = poll * CHUNK + c;
            if (span >= SPANS) continue;
#if EXACT && !ONE_ROW
            // Tensor cores truncate as they accumulate: long sums are made outside, where adding rounds to nearest.
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    float part[4] = {0.f, 0.f, 0.f, 0.f};
                    multiply_tile(part, weights, tile, span * 2 + half, half ? here[c].z : here[c].x, half ? here[c].w : here[c].y);
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[tile][i] = span + half == 0 ? part[i] : sum[tile][i] + part[i];
                }
#else
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                if (span == 0) sum[tile][0] = sum[tile][1] = sum[tile][2] = sum[tile][3] = 0.f;
                multiply_tile(sum[tile], weights, tile, span * 2, here[c].x, here[c].y);
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) multiply_tile(sum[tile], weights, tile, span * 2 + 1, here[c].z, here[c].w);
#endif
        }
        if (item + AHEAD < ITEMS) load_item(here, row_of(row_of_lane((item + AHEAD) / POLLS)), (item + AHEAD) % POLLS);
        if (poll == POLLS - 1) {
#if ONE_ROW
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sum[tile][i] += __shfl_xor_sync(EVERY_LANE, sum[tile][i], 1);
                    sum[tile][i] += __shfl_xor_sync(EVERY_LANE, sum[tile][i], 2);
                    if (pair == 0) partial[tile * 16 + i * 8 + row] = sum[tile][i];
                }
#else
            float* out = partial + (group * 8 + 2 * pair) * PARTIAL_STRIDE + row;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                out[tile * 16] = sum[tile][0];
                out[tile * 16 + PARTIAL_STRIDE] = sum[tile][1];
                out[tile * 16 + 8] = sum[tile][2];
                out[tile * 16 + 8 + PARTIAL_STRIDE] = sum[tile][3];
            }
#endif
        }
    }
}

// The sum over warps of four neighbouring values of a batch row.
__device__ __forceinline__ float4 summed(const float* partials, int row, int column) {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float4 part = *(const float4*)(partials + warp * PARTIAL_FLOATS + row * PARTIAL_STRIDE + column);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    return total;
}

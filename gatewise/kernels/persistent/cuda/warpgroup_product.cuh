// The recurrent matrix product of one step by warpgroups, with the functions of product.cuh: weights in registers, and batch
// rows in shared memory, from which all warps read them.
//
// TILES x 16 rows of weights are divided among TILE_GROUPS warpgroups, 64 rows each, the last of which may be zeros; the depth is
// divided into PARTS slices. So a value has PARTS partial sums and not one for each warp, and a tensor core waits for no other
// warp's sums. 16-bit formats only.
#pragma once
#include "factors.cuh"
#include "warpgroup.cuh"

constexpr int SPAN = 32;                                       // the values of a row of weights that four lanes load
constexpr int TILE_GROUPS = (TILES + 3) / 4;
constexpr int PARTS = WARPS / 4 / TILE_GROUPS;
static_assert(PARTS * TILE_GROUPS * 4 == WARPS, "whole warpgroups");
constexpr int SLICE = (WIDTH + 16 * PARTS - 1) / (16 * PARTS) * 16;  // the depth of a part
constexpr int PRODUCTS = SLICE / 16;                           // of a warpgroup, one after another
constexpr int PANELS = (SLICE + PANEL - 1) / PANEL;            // of a part
constexpr int PARTIAL_STRIDE = TILE_GROUPS * 64 + 4;           // in floats; the padding avoids bank conflicts of stores
constexpr int PARTIAL_FLOATS = ROWS * PARTIAL_STRIDE;
constexpr int LENT_WORDS = (PARTS * PANELS * PANEL_BYTES + 1024) / 16;  // the shared memory of the panels, before it is aligned
constexpr int SHARERS = TILE_GROUPS * 128;                     // the threads that copy and multiply a slice
constexpr int CHUNKS = SLICE / 8;                              // the copies of a batch row of a slice, 16 bytes each
constexpr int COPIES = (ROWS * CHUNKS + SHARERS - 1) / SHARERS;  // of a thread

__device__ __forceinline__ int own_part() { return (int)(threadIdx.x >> 5) / (TILE_GROUPS * 4); }
__device__ __forceinline__ int own_tile() { return (int)(threadIdx.x >> 5) % (TILE_GROUPS * 4); }
__device__ __forceinline__ int first_tile() { return own_tile(); }
__device__ __forceinline__ int first_depth() { return own_part() * SLICE; }
constexpr bool WHOLE_DEPTH = PARTS * SLICE == WIDTH;

struct Weights {
    u32 held[PRODUCTS][4];
    u32 panels;  // the address of the part's panels in shared memory
};

struct Scales {
    __device__ __forceinline__ void start() {}
};

// The index along the depth of the first value of a lane's 16 bytes of a row of weights.
__device__ __forceinline__ int depth_of(int span) { return first_depth() + span * SPAN + (threadIdx.x & 3) * (SPAN / 4); }

// Transposes a 4 x 4 matrix of words in four neighbouring lanes: lane j passes row j and receives column j.
__device__ __forceinline__ uint4 transposed_words(uint4 own) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const u32 near = __shfl_xor_sync(EVERY_LANE, odd ? own.x : own.y, 1), near_too = __shfl_xor_sync(EVERY_LANE, odd ? own.z : own.w, 1);
    const uint4 half = odd ? make_uint4(near, own.y, near_too, own.w) : make_uint4(own.x, near, own.z, near_too);
    const u32 far = __shfl_xor_sync(EVERY_LANE, high ? half.x : half.z, 2), far_too = __shfl_xor_sync(EVERY_LANE, high ? half.y : half.w, 2);
    return high ? make_uint4(far, far_too, half.z, half.w) : make_uint4(half.x, half.y, far, far_too);
}

// Loads all weights, as in product.cuh; `room` becomes the memory of the panels.
template <class Arrive, class PairAt>
__device__ __forceinline__ void load_weights(Weights& weights, uint4* room, Arrive arrive, PairAt pair_at) {
    const u32 first = (shared_address(room) + 1023) & ~1023u;
    weights.panels = first + own_part() * PANELS * PANEL_BYTES;
    // Values after the end of the depth stay zeros.
    for (u32 at = threadIdx.x * 16; at < PARTS * PANELS * PANEL_BYTES; at += THREADS * 16) store_shared(first + at, make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int span = 0; span < (PRODUCTS + 1) / 2; ++span) {
        arrive(span);
        Pair pair = {{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}};
        if (own_tile() < TILES) pair = pair_at(own_tile(), span);
        const uint4 a = pair.half[0], b = pair.half[1];
        const uint4 upper = transposed_words(make_uint4(a.x, a.z, b.x, b.z)), lower = transposed_words(make_uint4(a.y, a.w, b.y, b.w));
        u32(&even)[4] = weights.held[2 * span];
        even[0] = upper.x, even[1] = lower.x, even[2] = upper.y, even[3] = lower.y;
        if (2 * span + 1 < PRODUCTS) {
            u32(&odd)[4] = weights.held[2 * span + 1 < PRODUCTS ? 2 * span + 1 : 0];
            odd[0] = upper.z, odd[1] = lower.z, odd[2] = upper.w, odd[3] = lower.w;
        }
    }
    __syncthreads();
}

#ifndef UNROLLED
#define UNROLLED 4
#endif
struct InFlight {};  // copies to shared memory take no registers

// The thread's index among those that share a slice. The compiler must not compute all addresses of its copies before the first
// step, because the registers hold weights.
__device__ __forceinline__ int own_sharer() {
    int index = (int)threadIdx.x % SHARERS;
    forget_results_of(index);
    return index;
}

// A copy of a thread: 16 bytes of a batch row.
struct Item {
    int row, chunk;
    bool exists;

    __device__ __forceinline__ u32 place(const Weights& weights) const { return weights.panels + chunk / 8 * PANEL_BYTES + place_in_panel(row, chunk % 8); }

    // Nothing is loaded for rows that have ended.
    __device__ __forceinline__ void begin(const Weights& weights, const Row& source) const {
        begin_copy(place(weights), source.data + (chunk - (int)(threadIdx.x & 3)) * 8, !RAGGED || source.counted);
    }
};

__device__ __forceinline__ Item item_of(int sharer, int number) {
    const int index = sharer + number * SHARERS, chunk = index % CHUNKS;
    const bool whole = ROWS * CHUNKS % SHARERS == 0 && PARTS * SLICE == WIDTH;
    return {min(index / CHUNKS, ROWS - 1), chunk, whole || (index < ROWS * CHUNKS && own_part() * SLICE + chunk * 8 < WIDTH)};
}

// Loads begin when the last values of a step are there, in `finish_product`.
template <class RowAt>
__device__ __forceinline__ void begin_product(InFlight&, const Weights&, RowAt, int) {}

// Waits for one of the values that each block stores last. The copies of the step, which begin then, find nearly all values
// there; those that are missing are copied again.
template <class RowAt>
__device__ __forceinline__ void await_last_values(RowAt row_at, int step, Patience& patience) {
    const int lane = threadIdx.x & 31, within = min((lane + 1) * UNITS, SLICE) - 4, depth = first_depth() + within;
    const Row last = row_at(ROWS - 1, step);
    const Value* const from = last.data - depth_of(0) + depth;
    const bool waits = last.polled && lane * UNITS < SLICE && depth < WIDTH;
    uint2 words = make_uint2(0, 0);
    do {
        if (waits) words = load_exchanged_word_pair(from);
    } while (__any_sync(EVERY_LANE, is_unwritten(words)) && patience.is_left());
}

template <class RowAt>
__device__ __forceinline__ void finish_product(InFlight&, const Weights& weights, RowAt row_at, int step, float* partial, Patience& patience, Scales&) {
    patience.polls = 0;
#ifndef NO_GATE
    await_last_values(row_at, step, patience);
#endif
    const int first = own_sharer();
#pragma unroll UNROLLED
    for (int number = 0; number < COPIES; ++number) {
        const Item item = item_of(first, number);
        if (item.exists) item.begin(weights, row_at(item.row, step));
    }
    end_group_of_copies();
    bool missing;
    do {
        wait_for_copies<0>();
        missing = false;
        const int sharer = own_sharer();
#pragma unroll UNROLLED
        for (int number = 0; number < COPIES; ++number) {
            const Item item = item_of(sharer, number);
            if (!item.exists || !is_unwritten(load_shared(item.place(weights)))) continue;
            const Row row = row_at(item.row, step);
            if (!row.polled) continue;
            item.begin(weights, row);
            missing = true;
        }
        end_group_of_copies();
    } while (__any_sync(EVERY_LANE, missing) && patience.is_left());
    publish_to_products();
    barrier_of(1 + own_part(), SHARERS);
    float sum[ROWS / 8][4];
#pragma unroll
    for (int group = 0; group < ROWS / 8; ++group) sum[group][0] = sum[group][1] = sum[group][2] = sum[group][3] = 0.f;
    begin_group_products();
#pragma unroll
    for (int number = 0; number < PRODUCTS; ++number)
        multiply_in_group(sum, weights.held[number], at_step(described(weights.panels + number / 4 * PANEL_BYTES), number % 4), number > 0);
    end_group_products();
    const int lane = threadIdx.x & 31;
    if (own_tile() >= TILES) return;
    float* out = partial + 2 * (lane & 3) * PARTIAL_STRIDE + own_tile() * 16 + (lane >> 2);
#pragma unroll
    for (int group = 0; group < ROWS / 8; ++group, out += 8 * PARTIAL_STRIDE) {
        out[0] = sum[group][0], out[PARTIAL_STRIDE] = sum[group][1];
        out[8] = sum[group][2], out[8 + PARTIAL_STRIDE] = sum[group][3];
    }
}

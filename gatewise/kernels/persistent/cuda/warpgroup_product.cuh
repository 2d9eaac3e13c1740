// The recurrent matrix product of one step by warpgroups, with the functions of product.cuh: weights in registers, and batch
// rows in shared memory, from which all warps read them.
//
// A warp multiplies one tile of 16 rows of weights over the whole depth. So a value has one sum and not one for each warp, of
// which the addition in shared memory takes longer than the products if there are many batch rows. 16-bit formats only.
#pragma once
#include "factors.cuh"
#include "warpgroup.cuh"

static_assert(TILES == WARPS && WARPS % 4 == 0, "a tile for each warp, in whole warpgroups");
constexpr int SPAN = 32;                            // the values of a row of weights that four lanes load
constexpr int DEPTH_PADDED = (WIDTH + 15) / 16 * 16;
constexpr int PRODUCTS = DEPTH_PADDED / 16;         // of a warpgroup, one after another
constexpr int PANELS = (DEPTH_PADDED + PANEL - 1) / PANEL;
constexpr int PARTS = 1;                            // the sums of each value
constexpr int PARTIAL_STRIDE = TILES * 16 + 4;      // in floats; the padding avoids bank conflicts of stores
constexpr int PARTIAL_FLOATS = ROWS * PARTIAL_STRIDE;
constexpr int LENT_WORDS = (PANELS * PANEL_BYTES + 1024) / 16;  // the shared memory of the panels, before it is aligned
constexpr int CHUNKS = DEPTH_PADDED / 8;            // the copies of a batch row, 16 bytes each
constexpr int COPIES = (ROWS * CHUNKS + THREADS - 1) / THREADS;  // of a thread

__device__ __forceinline__ int own_part() { return 0; }
__device__ __forceinline__ int own_tile() { return threadIdx.x >> 5; }

struct Weights {
    u32 held[PRODUCTS][4];
    u32 panels;  // the address of the panels in shared memory
};

struct Scales {
    __device__ __forceinline__ void start() {}
};

// The index along the depth of the first value of a lane's 16 bytes of a row of weights.
__device__ __forceinline__ int depth_of(int span) { return span * SPAN + (threadIdx.x & 3) * (SPAN / 4); }
__device__ __forceinline__ int load_depth() { return depth_of(0); }

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
    weights.panels = (shared_address(room) + 1023) & ~1023u;
    // Values after the end of the depth stay zeros.
    for (u32 at = threadIdx.x * 16; at < PANELS * PANEL_BYTES; at += THREADS * 16) store_shared(weights.panels + at, make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int span = 0; span < (PRODUCTS + 1) / 2; ++span) {
        arrive(span);
        const Pair pair = pair_at(own_tile(), span);
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

struct InFlight {};  // copies to shared memory take no registers

// The thread's index. The compiler must not compute all addresses of its copies before the first step, because the registers
// hold weights.
__device__ __forceinline__ int own_index() {
    int index = (int)threadIdx.x;
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

__device__ __forceinline__ Item item_of(int thread, int number) {
    const int index = thread + number * THREADS, chunk = index % CHUNKS;
    const bool whole = ROWS * CHUNKS % THREADS == 0 && DEPTH_PADDED == WIDTH;
    return {min(index / CHUNKS, ROWS - 1), chunk, whole || (index < ROWS * CHUNKS && chunk * 8 < WIDTH)};
}

// Loads begin when the last values of a step are there, in `finish_product`.
template <class RowAt>
__device__ __forceinline__ void begin_product(InFlight&, RowAt, int) {}

template <class RowAt>
__device__ __forceinline__ void finish_product(InFlight&, const Weights& weights, RowAt row_at, int step, float* partial, Patience& patience, Scales&) {
    patience.polls = 0;
    const int first = own_index();
#pragma unroll 4
    for (int number = 0; number < COPIES; ++number) {
        const Item item = item_of(first, number);
        if (item.exists) item.begin(weights, row_at(item.row, step));
    }
    end_group_of_copies();
    bool missing;
    do {
        wait_for_copies<0>();
        missing = false;
        const int again = own_index();
#pragma unroll 4
        for (int number = 0; number < COPIES; ++number) {
            const Item item = item_of(again, number);
            if (!item.exists || !is_unwritten(load_shared(item.place(weights)))) continue;
            const Row row = row_at(item.row, step);
            if (!row.polled) continue;
            item.begin(weights, row);
            missing = true;
        }
        end_group_of_copies();
    } while (__any_sync(EVERY_LANE, missing) && patience.is_left());
    publish_to_products();
    __syncthreads();
    float sum[ROWS / 8][4];
#pragma unroll
    for (int group = 0; group < ROWS / 8; ++group) sum[group][0] = sum[group][1] = sum[group][2] = sum[group][3] = 0.f;
    begin_group_products();
#pragma unroll
    for (int number = 0; number < PRODUCTS; ++number)
        multiply_in_group(sum, weights.held[number], at_step(described(weights.panels + number / 4 * PANEL_BYTES), number % 4), number > 0);
    end_group_products();
    const int lane = threadIdx.x & 31;
    float* out = partial + 2 * (lane & 3) * PARTIAL_STRIDE + own_tile() * 16 + (lane >> 2);
#pragma unroll
    for (int group = 0; group < ROWS / 8; ++group, out += 8 * PARTIAL_STRIDE) {
        out[0] = sum[group][0], out[PARTIAL_STRIDE] = sum[group][1];
        out[8] = sum[group][2], out[8 + PARTIAL_STRIDE] = sum[group][3];
    }
}

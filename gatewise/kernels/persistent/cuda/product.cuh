// The recurrent matrix product of one step: one operand is the weights, in registers; the other is polled from the exchange.
//
// A block multiplies TILES x 16 rows of weights with ROWS batch rows over a depth of WIDTH. Its warps share the depth: warp w
// multiplies SPANS spans of SPAN values, from w * SPANS * SPAN on, for all rows of weights, and writes its partial sums to
// shared memory. The weights of RESIDENT tiles are in registers, the others in shared memory. A warp multiplies EIGHTS groups of
// eight batch rows at a time: a read of weights from shared memory serves all of them, and their loads are in flight together. A
// poll loads CHUNK spans of each of these groups, and up to MOST_AHEAD polls are in flight. A product may take the depth in any
// order, so each lane's fragment is 16 contiguous bytes of a batch row, which needs no staging in shared memory.
#pragma once
#include "factors.cuh"

#ifndef EIGHTS
#define EIGHTS 1
#endif

constexpr int SPAN = 64 / sizeof(Value);  // the values that four lanes load, 16 bytes each
constexpr int NEXT_SPAN = INTERLEAVED ? 8 * SPAN : SPAN;  // the distance from one span of a batch row to the next, in values
constexpr int GROUPS_OF_EIGHT = ROWS / 8;              // of batch rows; eight are the width of a tensor-core tile
constexpr int PARTIAL_STRIDE = TILES * 16 + 4;         // in floats; the padding avoids bank conflicts of stores
constexpr int PARTIAL_FLOATS = ROWS * PARTIAL_STRIDE;  // the partial sums of a warp
constexpr int PARTS = WARPS;                           // the partial sums of each value
constexpr int POLLS = (SPANS + CHUNK - 1) / CHUNK;     // polls of a group of eight rows, CHUNK spans each
constexpr int PASSES = (GROUPS_OF_EIGHT + EIGHTS - 1) / EIGHTS;  // passes over the weights in a step
constexpr int ITEMS = PASSES * POLLS;                  // polls of EIGHTS groups at a time, all of a step
constexpr int AHEAD = MOST_AHEAD < ITEMS ? MOST_AHEAD : ITEMS;  // polls in flight

constexpr int FRAGMENTS = SCALED ? 1 : 2;              // fragments of a lane for one tile and span, and tensor-core products with them
constexpr int LENT = TILES - RESIDENT;                 // tiles whose weights are in shared memory, because registers have no room for them
constexpr int LENT_WORDS = WARPS * LENT * SPANS * FRAGMENTS * 32;  // the size of those, in words of 16 bytes

static_assert(!EXACT || EIGHTS == 1, "sums that are added up outside of tensor cores take too many registers");

// A lane's weights: those of RESIDENT tiles in registers, the others at `lent`, in the lane's part of shared memory.
struct Weights {
    u32 held[RESIDENT][SPANS * FRAGMENTS][4];
    const uint4* lent;
#if SCALED
    float inverse_scale;  // of the warp's weights, which are multiplied by a power of two
#endif
};

// The index along the depth of the first value of a lane's 16 bytes, in span `span` of its warp.
__device__ __forceinline__ int depth_of(int span) {
    return ((threadIdx.x >> 5) * SPANS + span) * SPAN + (threadIdx.x & 3) * (SPAN / 4);
}

// The batch row that a lane loads in a group of eight; with ONE_ROW all lanes load the same row.
__device__ __forceinline__ int row_of_lane(int group) { return ONE_ROW ? 0 : group * 8 + ((threadIdx.x & 31) >> 2); }

#if SCALED
// Each warp multiplies its part of a batch row with a scale, a power of two that gives the largest value the exponent CENTRE in
// fp16. The largest value is not known before the row arrives, so the scale is that of the last step, and the product is
// repeated with another one if it does not fit: if values are too large for fp16, or all are less than LEAST. Then no value
// loses more than 2^-23 of the largest.
constexpr u32 LEAST = 13u << Factor::MANTISSA_BITS, INFINITE = Factor::INFINITE;  // 2^-2; bits of fp16
constexpr int CENTRE = 23;                              // 2^8
constexpr int SMALLEST_SCALE = 17, LARGEST_SCALE = 235, LARGEST_WEIGHT_SCALE = 239;  // 2^-110, 2^108, 2^112
constexpr int FIRST_WEIGHT_SCALE = 139;                 // 2^12
constexpr u32 LEAST_WEIGHT = 17u << Factor::MANTISSA_BITS;  // 2^2

__device__ __forceinline__ u32 largest_finite(uint4 words) {
    auto size = [](u32 word) { return Number::finite_magnitude(word); };
    return max(max(size(words.x), size(words.y)), max(size(words.z), size(words.w)));
}

// Two fragments of fp32 as one of fp16.
__device__ __forceinline__ uint4 packed(Pair pair, float scale) {
    auto both = [&](u32 low, u32 high) { return Factor::pair(widened(low) * scale, widened(high) * scale); };
    const uint4 first = pair.half[0], second = pair.half[1];
    return make_uint4(both(first.x, first.z), both(first.y, first.w), both(second.x, second.z), both(second.y, second.w));
}

// The scale that a row needs whose largest value is `most` in fp16 after multiplication with `scale`.
__device__ __forceinline__ float rescaled(float scale, u32 most) {
    const int exponent = Number::exponent_of(scale), taken = most >> Factor::MANTISSA_BITS;
    const int shift = most >= INFINITE ? -24 : most == 1 ? 24 : CENTRE - taken;  // 1: too small for fp16
    return Number::power_of_two(max(SMALLEST_SCALE, min(LARGEST_SCALE, exponent + shift)));
}
#else
__device__ __forceinline__ uint4 rounded(uint4 words) {
    return make_uint4(rounded(words.x), rounded(words.y), rounded(words.z), rounded(words.w));
}
#endif

#if SCALED
constexpr int ROOM = (65536 / THREADS < 256 ? 65536 / THREADS : 255) - 72;  // registers for weights, and for loads in flight

// Whether pair `number` is the first one of a batch of loads: a batch has as many as registers have room for.
__device__ constexpr bool begins_loads(int number) {
    int first = 0;
    while (first < number) {
        const int held = 4 * (first / TILES * RESIDENT + (first % TILES < RESIDENT ? first % TILES : RESIDENT));
        first += held + 3 * 8 < ROOM ? (ROOM - held) / 8 : 3;
    }
    return first == number;
}
#endif

// Loads all weights. `arrive(span)` is called for each span in turn, then `pair_at(tile, span)` returns the weights of a tile in
// it; `room` is shared memory for LENT_WORDS.
template <class Arrive, class PairAt>
__device__ __forceinline__ void load_weights(Weights& weights, uint4* room, Arrive arrive, PairAt pair_at) {
    room += (threadIdx.x >> 5) * LENT * SPANS * FRAGMENTS * 32 + (threadIdx.x & 31);
    weights.lent = room;
#if SCALED
    // The first scale is right for most matrices, which are then read once.
    int exponent = FIRST_WEIGHT_SCALE;
again:
    u32 most = 0;
    const float scale = Number::power_of_two(exponent);
#endif
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
        arrive(span);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#if SCALED
            // Otherwise the compiler would have more loads in flight than registers have room for.
            if (begins_loads(span * TILES + tile)) __syncwarp();
#endif
            const Pair pair = pair_at(tile, span);
#pragma unroll
            for (int half = 0; half < FRAGMENTS; ++half) {
#if SCALED
                const uint4 fragment = packed(pair, scale);
                most = Factor::larger_magnitudes(Factor::larger_magnitudes(most, fragment.x), fragment.y);
                most = Factor::larger_magnitudes(Factor::larger_magnitudes(most, fragment.z), fragment.w);
#else
                const uint4 fragment = rounded(pair.half[half]);
#endif
                const int place = span * FRAGMENTS + half;
                if (tile < RESIDENT) {
                    u32(&held)[4] = weights.held[tile < RESIDENT ? tile : 0][place];
                    held[0] = fragment.x, held[1] = fragment.y, held[2] = fragment.z, held[3] = fragment.w;
                } else {
                    room[((tile - RESIDENT) * SPANS * FRAGMENTS + place) * 32] = fragment;
                }
            }
        }
    }
#if SCALED
    const u32 largest = __reduce_max_sync(EVERY_LANE, max(most & 0xffffu, most >> 16));
    if (exponent == FIRST_WEIGHT_SCALE && largest - LEAST_WEIGHT >= INFINITE - LEAST_WEIGHT) {
        most = 0;
#pragma unroll 1
        for (int span = 0; span < SPANS; ++span) {
            __syncwarp();
            arrive(span);
#pragma unroll 1
            for (int tile = 0; tile < TILES; ++tile) {
                const Pair pair = pair_at(tile, span);
                most = max(most, max(largest_finite(pair.half[0]), largest_finite(pair.half[1])));
            }
        }
        __syncwarp();
        most = __reduce_max_sync(EVERY_LANE, most);
        exponent = min(LARGEST_WEIGHT_SCALE, 268 - (int)(most >> Number::MANTISSA_BITS));  // the largest value becomes 2^14
        if (most && exponent != FIRST_WEIGHT_SCALE) goto again;
    }
    weights.inverse_scale = Number::power_of_two(254 - exponent);
#endif
}

// A fragment of the weights: the rows of a tile at one place along the depth.
struct Fragment {
    u32 words[4];
};

__device__ __forceinline__ Fragment fragment_of(const Weights& weights, int tile, int place) {
    if (tile < RESIDENT) {
        const u32(&held)[4] = weights.held[tile < RESIDENT ? tile : 0][place];
        return {held[0], held[1], held[2], held[3]};
    }
    const uint4 lent = weights.lent[((tile - RESIDENT) * SPANS * FRAGMENTS + place) * 32];
    return {lent.x, lent.y, lent.z, lent.w};
}

// Adds the product of a fragment of weights and a batch row's values to a lane's sums. If it is the `first`, the sums begin with it.
__device__ __forceinline__ void add_product(float (&sum)[4], const Fragment& fragment, u32 b0, u32 b1, bool first) {
#if EXACT && !ONE_ROW
    // Tensor cores truncate when they accumulate, so long sums are added up outside of them, rounding to nearest.
    float part[4] = {0.f, 0.f, 0.f, 0.f};
    multiply<Factor>(part, fragment.words, b0, b1);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = first ? part[i] : sum[i] + part[i];
#else
    if (first) sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
#if ONE_ROW
    // With a single batch row, a lane adds up two sums over the values it loaded: for the row of weights lane / 4 and the eighth
    // row after it.
    sum[0] = fmaf(widened(fragment.words[0]), widened(b0), sum[0]), sum[1] = fmaf(widened(fragment.words[1]), widened(b0), sum[1]);
    sum[0] = fmaf(widened(fragment.words[2]), widened(b1), sum[0]), sum[1] = fmaf(widened(fragment.words[3]), widened(b1), sum[1]);
#else
    multiply<Factor>(sum, fragment.words, b0, b1);
#endif
#endif
}

#if INTERLEAVED
// The values of a row in the exchange buffer, which are whole spans.
constexpr u32 EXCHANGED_WIDTH = (WIDTH * SPLIT + SPAN - 1) / SPAN * SPAN;
// The index of a value among those of a step in the exchange buffer, which has the rows of all groups, also those beyond the
// batch. `row` is counted from the group's first row, `first_row`.
__device__ __forceinline__ u32 interleaved_place(u32 first_row, u32 row, u32 value) {
    return (first_row + (row & ~7u)) * EXCHANGED_WIDTH + (row & 7) * SPAN + value / SPAN * (8 * SPAN) + value % SPAN;
}

// Where the first values that a lane loads lie among those of a step, in a depth that begins at `first_value`. With
// SKIPPED_BEYOND, lanes of rows beyond the batch load the last row of the batch instead, if it is in the last eight rows of the
// group: loads of the same addresses are one.
struct LanePlaces {
    u32 first, last;  // in the first and in the last eight rows of the group

    __device__ __forceinline__ LanePlaces(int first_row, int batch, u32 first_value) {
        const int row = row_of_lane(0), left = batch - 1 - (first_row + ROWS - 8);
        first = interleaved_place(first_row, row, first_value + depth_of(0));
        last = interleaved_place(first_row, ROWS - 8 + max(0, min(row, left)), first_value + depth_of(0));
    }

    // The address of the first value of a row.
    __device__ __forceinline__ const Value* of(const Value* step, u32 row) const {
        const u32 eight = row & ~7u;
        return SKIPPED_BEYOND && eight == ROWS - 8 ? common_address(step + last) : common_address(step + first) + eight * EXCHANGED_WIDTH;
    }
};
#endif

__device__ __forceinline__ uint4 load_span(Row row, int span) {
    const bool wanted = !(RAGGED || SKIPPED_BEYOND == 2) || row.counted;  // not for rows that have ended, nor for eight rows beyond the batch
    const bool exists = span < SPANS && (WARPS * SPANS * SPAN <= WIDTH || depth_of(span) < WIDTH);
    return wanted && exists ? load_exchanged(row.data + span * NEXT_SPAN) : make_uint4(0, 0, 0, 0);
}

using Words = uint4[EIGHTS][CHUNK];  // of an item: for each of its groups of eight rows, those of a poll
using InFlight = Words[AHEAD];

// Calls `use(which, group)` for each group of eight rows of an item, the `which`-th one of its pass.
template <class Use>
__device__ __forceinline__ void for_groups(int item, Use use) {
#pragma unroll
    for (int which = 0; which < EIGHTS; ++which) {
        const int group = item / POLLS * EIGHTS + which;
        if (group < GROUPS_OF_EIGHT) use(which, group);
    }
}

template <class RowOf>
__device__ __forceinline__ void load_item(Words& words, RowOf row_of, int item) {
    for_groups(item, [&](int which, int group) {
        const Row row = row_of(row_of_lane(group));
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) words[which][c] = load_span(row, item % POLLS * CHUNK + c);
    });
}

template <class RowOf>
__device__ __forceinline__ bool is_missing(const Words& words, RowOf row_of, int item) {
    bool missing = false;
    for_groups(item, [&](int which, int group) {
        bool unwritten = false;
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) unwritten |= is_unwritten(words[which][c]);
        missing |= unwritten && row_of(row_of_lane(group)).polled;
    });
    return __any_sync(EVERY_LANE, missing);
}

template <class RowOf>
__device__ __forceinline__ void await_item(Words& words, RowOf row_of, int item, Patience& patience) {
    while (is_missing(words, row_of, item) && patience.is_left()) load_item(words, row_of, item);
}

// 1: each load of a later item is issued right after the last product with the value in its registers, so that more bytes are
// in flight. 0: all loads of an item are issued after all products. Forward passes have 1, of which those of wide layers gain
// (benchmarks/results/loops.jsonl).
#ifndef EARLY_LOADS
#define EARLY_LOADS 0
#endif

// Issues the first loads of a step, at the end of the step before: earlier, values would not have arrived, and the loads would
// only take bandwidth of the second-level cache. `row_at(row, step)` returns the source of a batch row.
template <class RowAt>
__device__ __forceinline__ void begin_product(InFlight& words, RowAt row_at, int step) {
#pragma unroll
    for (int item = 0; item < AHEAD; ++item)
        load_item(words[item], [&](int row) { return row_at(row, step); }, item);
}

#if SCALED
// The scale of a lane's batch row in each group of eight rows.
struct Scales {
    float own[GROUPS_OF_EIGHT];  // the scale, the same in the row's four lanes
    u32 most[GROUPS_OF_EIGHT];   // the lane's largest scaled value in this step, as bits of fp16: 0 if all are 0, 1 if it is too small for fp16

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int group = 0; group < GROUPS_OF_EIGHT; ++group) own[group] = Number::power_of_two(CENTRE - 15 + 127);  // for hidden states near 1
    }

    // Changes the scales of rows that do not fit; returns whether the product has to be repeated for any row.
    template <class RowOf>
    __device__ __forceinline__ bool change(RowOf row_of) {
        bool fit = true;
#pragma unroll
        for (int group = 0; group < GROUPS_OF_EIGHT; ++group)
            fit = fit && (most[group] == 0 || most[group] - LEAST < INFINITE - LEAST || !row_of(row_of_lane(group)).counted);
        if (__all_sync(EVERY_LANE, fit)) return false;
        bool changed = false;
#pragma unroll
        for (int group = 0; group < GROUPS_OF_EIGHT; ++group) {
            u32 row = max(most[group], __shfl_xor_sync(EVERY_LANE, most[group], 1));
            row = max(row, __shfl_xor_sync(EVERY_LANE, row, 2));
            if (row == 0 || row - LEAST < INFINITE - LEAST || !row_of(row_of_lane(group)).counted) continue;
            const float before = own[group];
            own[group] = rescaled(before, row);
            changed = changed || own[group] != before;
        }
        return __any_sync(EVERY_LANE, changed);
    }
};

// Converts a lane's values to fp16, in the first two words, and updates the largest one.
__device__ __forceinline__ void narrow_operands(uint4& words, float scale, u32& most, u32& some) {
    auto both = [&](u32 low, u32 high) { return Factor::pair(widened(low) * scale, widened(high) * scale); };
    some |= words.x | words.y, some |= words.z | words.w;
    words.x = both(words.x, words.y), words.y = both(words.z, words.w);
    most = Factor::larger_magnitudes(Factor::larger_magnitudes(most, words.x), words.y);
}
#else
struct Scales {
    __device__ __forceinline__ void start() {}
};
#endif

// Multiplies the values as they arrive, polling for them; `partial` is this warp's part of shared memory.
template <class RowAt>
__device__ __forceinline__ void finish_product(InFlight& words, const Weights& weights, RowAt row_at, int step, float* partial, Patience& patience, Scales& scales) {
    const int row = (threadIdx.x & 31) >> 2, pair = threadIdx.x & 3;
    float sums[EIGHTS][TILES][4];
    float even[EIGHTS], odd[EIGHTS];  // the factors of the two batch rows whose sums the lane has
    patience.polls = 0;
    auto row_of = [&](int row) { return row_at(row, step); };
#if SCALED
    u32 most[EIGHTS], some[EIGHTS];
again:
    forget_results_of(step);  // all addresses, which would be computed before the first product, and spilled
#endif
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int poll = item % POLLS, later = item + AHEAD;
        Words& here = words[item % AHEAD];
        await_item(here, row_of, item, patience);
        for_groups(item, [&](int which, int group) {
#if SCALED
            if (poll == 0) most[which] = some[which] = 0;
#pragma unroll
            for (int c = 0; c < CHUNK; ++c) narrow_operands(here[which][c], scales.own[group], most[which], some[which]);
            if (poll < POLLS - 1) return;
            const u32 halves = max(most[which] & 0xffffu, most[which] >> 16);
            scales.most[group] = halves ? halves : some[which] << 1 ? 1u : 0u;
            // The factor of the lane's own row, then those of the two rows whose sums it has. A block that gave up waiting may have
            // read numbers from a marked buffer, so its sums become NaN here.
            const float all = MARKED && patience.lost ? Number::not_a_number() : weights.inverse_scale;
            const float unit = all * Number::power_of_two(254 - Number::exponent_of(scales.own[group]));
            even[which] = __shfl_sync(EVERY_LANE, unit, 8 * pair), odd[which] = __shfl_sync(EVERY_LANE, unit, 8 * pair + 4);
#else
            even[which] = odd[which] = 1.f;
#endif
        });
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            const int span = poll * CHUNK + c;
#pragma unroll
            for (int half = 0; half < FRAGMENTS; ++half)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    // If this were part of the loop's condition, NVRTC would leave some loops rolled, with all values in local memory.
                    if (SPANS % CHUNK != 0 && span >= SPANS) continue;
                    const Fragment fragment = fragment_of(weights, tile, span * FRAGMENTS + half);
                    for_groups(item, [&](int which, int) {
                        const uint4& from = here[which][c];
                        add_product(sums[which][tile], fragment, half ? from.z : from.x, half ? from.w : from.y, span + half == 0);
                    });
                }
            if (EARLY_LOADS && later < ITEMS) {
                for_groups(later, [&](int which, int group) { here[which][c] = load_span(row_of(row_of_lane(group)), later % POLLS * CHUNK + c); });
                __syncwarp();  // otherwise the compiler would move the loads behind later products
            }
        }
        if (!EARLY_LOADS && later < ITEMS) load_item(here, row_of, later);
        if (poll < POLLS - 1) continue;
        for_groups(item, [&](int which, int group) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float(&sum)[4] = sums[which][tile];
#if ONE_ROW
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sum[i] += __shfl_xor_sync(EVERY_LANE, sum[i], 1);
                    sum[i] += __shfl_xor_sync(EVERY_LANE, sum[i], 2);
                    if (pair == 0) partial[tile * 16 + i * 8 + row] = sum[i];
                }
#else
                float* const out = partial + (group * 8 + 2 * pair) * PARTIAL_STRIDE + row + tile * 16;
                out[0] = sum[0] * even[which];
                out[PARTIAL_STRIDE] = sum[1] * odd[which];
                out[8] = sum[2] * even[which];
                out[8 + PARTIAL_STRIDE] = sum[3] * odd[which];
#endif
            }
        });
    }
#if SCALED
    if (scales.change(row_of)) {
        begin_product(words, row_at, step);
        goto again;
    }
#endif
}

// The number of the partial sums that a warp computes.
__device__ __forceinline__ int own_part() { return threadIdx.x >> 5; }

// The recurrent matrix product of one step: one factor are the weights, in registers; the other is polled from the exchange.
//
// A block multiplies TILES x 16 rows of weights with ROWS batch rows over a depth of WIDTH. Its warps share the depth: warp w
// multiplies SPANS spans of SPAN values, from w * SPANS * SPAN on, for all rows of weights, and writes its partial sums to
// shared memory. A product may take the depth in any order, so each lane's fragment is 16 contiguous bytes of a batch row,
// which needs no staging in shared memory.
#pragma once
#include "factors.cuh"

constexpr int SPAN = 64 / sizeof(Value);  // the values that four lanes load, 16 bytes each
constexpr int NEIGHBOURS = ROWS / 8;                   // groups of eight batch rows, the width of a tensor-core tile
constexpr int PARTIAL_STRIDE = TILES * 16 + 4;         // in floats; the padding avoids bank conflicts of stores
constexpr int PARTIAL_FLOATS = ROWS * PARTIAL_STRIDE;  // the partial sums of a warp
constexpr int PARTS = WARPS;                           // the partial sums of each value
constexpr int POLLS = (SPANS + CHUNK - 1) / CHUNK;     // polls of a group of eight rows, CHUNK spans each
constexpr int ITEMS = NEIGHBOURS * POLLS;
constexpr int AHEAD = DEPTH < ITEMS ? DEPTH : ITEMS;   // polls in flight

constexpr int FRAGMENTS = SCALED ? 1 : 2;              // fragments of a lane for one tile and span, and tensor-core products with them
constexpr int LENT = TILES - RESIDENT;                 // tiles whose weights are in shared memory, because registers have no room for them
constexpr int LENT_WORDS = WARPS * LENT * SPANS * FRAGMENTS * 32;  // the size of those, in words of 16 bytes

// A lane's weights: those of RESIDENT tiles in registers, the others at `lent`, in the lane's part of shared memory.
struct Weights {
    u32 held[RESIDENT][SPANS * FRAGMENTS][4];
    const uint4* lent;
#if SCALED
    float unit;  // the factor that was taken out of the warp's weights
#endif
};

#ifndef ROTATED
#define ROTATED 0
#endif
#ifndef PAIRED
#define PAIRED 0
#endif
__device__ __forceinline__ int own_slice() {
#if ROTATED
    return ((threadIdx.x >> 5) + blockIdx.x / SPLIT) % WARPS;
#else
    return threadIdx.x >> 5;
#endif
}

// The index along the depth of the first value of a lane's 16 bytes, in span `span` of its warp.
__device__ __forceinline__ int depth_of(int span) {
    return (own_slice() * SPANS + span) * SPAN + (threadIdx.x & 3) * (SPAN / 4);
}
#if PAIRED
static_assert(CHUNK % 2 == 0 && SPANS % 2 == 0, "");
__device__ __forceinline__ int load_depth() { return own_slice() * SPANS * SPAN + (threadIdx.x & 7) * (SPAN / 4); }
#else
__device__ __forceinline__ int load_depth() { return depth_of(0); }
#endif

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
    weights.unit = Number::power_of_two(254 - exponent);
#endif
}

__device__ __forceinline__ void multiply_tile(float (&sum)[4], const Weights& weights, int tile, int place, u32 b0, u32 b1) {
    u32 fragment[4];
    if (tile < RESIDENT) {
        const u32(&held)[4] = weights.held[tile < RESIDENT ? tile : 0][place];
        fragment[0] = held[0], fragment[1] = held[1], fragment[2] = held[2], fragment[3] = held[3];
    } else {
        const uint4 lent = weights.lent[((tile - RESIDENT) * SPANS * FRAGMENTS + place) * 32];
        fragment[0] = lent.x, fragment[1] = lent.y, fragment[2] = lent.z, fragment[3] = lent.w;
    }
#if ONE_ROW
    // With a single batch row, a lane adds up two sums over the values it loaded: for the row of weights lane / 4 and the eighth
    // row after it.
    sum[0] = fmaf(widened(fragment[0]), widened(b0), sum[0]), sum[1] = fmaf(widened(fragment[1]), widened(b0), sum[1]);
    sum[0] = fmaf(widened(fragment[2]), widened(b1), sum[0]), sum[1] = fmaf(widened(fragment[3]), widened(b1), sum[1]);
#else
    multiply<Factor>(sum, fragment, b0, b1);
#endif
}

#if PAIRED
struct Rows { Row first, second; };
template <class RowAt>
__device__ __forceinline__ Rows rows_at(RowAt row_at, int group, int step) {
    const int n = group * 8 + ((threadIdx.x & 31) >> 2);
    return {row_at(n & ~1, step), row_at(n | 1, step)};
}
__device__ __forceinline__ uint4 load_span(const Rows& rows, int span) {
    const Row& row = span & 1 ? rows.second : rows.first;
    const bool wanted = !RAGGED || row.counted;
    const bool exists = span < SPANS && (WARPS * SPANS * SPAN <= WIDTH || load_depth() + (span & ~1) * SPAN < WIDTH);
    return wanted && exists ? load_exchanged(row.data + (span & ~1) * SPAN) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ bool is_missing(const uint4 (&words)[CHUNK], const Rows& rows) {
    bool missing = false;
#pragma unroll
    for (int c = 0; c < CHUNK; ++c) missing |= is_unwritten(words[c]) && (c & 1 ? rows.second : rows.first).polled;
    return __any_sync(EVERY_LANE, missing);
}
__device__ __forceinline__ void exchange_halves(uint4 (&words)[CHUNK]) {
    const bool odd = threadIdx.x & 4;
#pragma unroll
    for (int c = 0; c < CHUNK; c += 2) {
        uint4 &a = words[c], &b = words[c + 1];
        auto swap = [&](u32& x, u32& y) {
            const u32 got = __shfl_xor_sync(EVERY_LANE, odd ? x : y, 4);
            if (odd) x = got; else y = got;
        };
        swap(a.x, b.x), swap(a.y, b.y), swap(a.z, b.z), swap(a.w, b.w);
    }
}
#else
using Rows = Row;
template <class RowAt>
__device__ __forceinline__ Rows rows_at(RowAt row_at, int group, int step) { return row_at(row_of_lane(group), step); }
__device__ __forceinline__ uint4 load_span(Row row, int span) {
    const bool wanted = !RAGGED || row.counted;  // nothing is loaded for rows that have ended
    const bool exists = span < SPANS && (WARPS * SPANS * SPAN <= WIDTH || depth_of(span) < WIDTH);
    return wanted && exists ? load_exchanged(row.data + span * SPAN) : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ bool is_missing(const uint4 (&words)[CHUNK], Row row) {
    bool missing = false;
#pragma unroll
    for (int c = 0; c < CHUNK; ++c) missing |= is_unwritten(words[c]);
    return __any_sync(EVERY_LANE, missing && row.polled);
}
__device__ __forceinline__ void exchange_halves(uint4 (&words)[CHUNK]) {}
#endif

__device__ __forceinline__ void load_item(uint4 (&words)[CHUNK], Rows row, int poll) {
#pragma unroll
    for (int c = 0; c < CHUNK; ++c) words[c] = load_span(row, poll * CHUNK + c);
}

__device__ __forceinline__ void await_item(uint4 (&words)[CHUNK], Rows row, int poll, Patience& patience) {
    while (is_missing(words, row) && patience.is_left()) load_item(words, row, poll);
}

using InFlight = uint4[AHEAD][CHUNK];

// Whether each load of a later item is issued as soon as the products with the value in its registers are, and not all loads
// of the item after all products: more bytes are in flight then. Only forward passes of wide layers gain from it
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
        load_item(words[item], rows_at(row_at, item / POLLS, step), item % POLLS);
}

#if SCALED
// The scale of a lane's batch row in each group of eight rows.
struct Scales {
    float own[NEIGHBOURS];  // the scale, the same in the row's four lanes
    u32 most[NEIGHBOURS];   // the lane's largest scaled value in this step, as bits of fp16: 0 if all are 0, 1 if it is too small for fp16

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int group = 0; group < NEIGHBOURS; ++group) own[group] = Number::power_of_two(CENTRE - 15 + 127);  // for hidden states near 1
    }

    // Changes the scales of rows that do not fit; returns whether the product has to be repeated for any row.
    template <class RowOf>
    __device__ __forceinline__ bool change(RowOf row_of) {
        bool fit = true;
#pragma unroll
        for (int group = 0; group < NEIGHBOURS; ++group)
            fit = fit && (most[group] == 0 || most[group] - LEAST < INFINITE - LEAST || !row_of(row_of_lane(group)).counted);
        if (__all_sync(EVERY_LANE, fit)) return false;
        bool changed = false;
#pragma unroll
        for (int group = 0; group < NEIGHBOURS; ++group) {
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
    float sum[TILES][4];
    patience.polls = 0;
#if SCALED
    u32 most = 0, some = 0;
again:
    forget_results_of(step);  // all addresses, which would be computed before the first product, and spilled
    auto row_of = [&](int row) { return row_at(row, step); };
#else
    auto row_of = [&](int row) { return row_at(row, step); };
#endif
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int group = item / POLLS, poll = item % POLLS, later = item + AHEAD;
        uint4(&here)[CHUNK] = words[item % AHEAD];
        await_item(here, rows_at(row_at, group, step), poll, patience);
        exchange_halves(here);
#if SCALED
        if (poll == 0) most = some = 0;
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) narrow_operands(here[c], scales.own[group], most, some);
#endif
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) {
            const int span = poll * CHUNK + c;
#if EXACT && !ONE_ROW
            // Tensor cores truncate when they accumulate, so long sums are added up outside of them, rounding to nearest.
#pragma unroll
            for (int half = 0; half < 2 && span < SPANS; ++half)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    float part[4] = {0.f, 0.f, 0.f, 0.f};
                    multiply_tile(part, weights, tile, span * 2 + half, half ? here[c].z : here[c].x, half ? here[c].w : here[c].y);
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[tile][i] = span + half == 0 ? part[i] : sum[tile][i] + part[i];
                }
#else
#pragma unroll
            for (int tile = 0; tile < TILES && span < SPANS; ++tile) {
                if (span == 0) sum[tile][0] = sum[tile][1] = sum[tile][2] = sum[tile][3] = 0.f;
                multiply_tile(sum[tile], weights, tile, span * FRAGMENTS, here[c].x, here[c].y);
            }
#if !SCALED
#pragma unroll
            for (int tile = 0; tile < TILES && span < SPANS; ++tile) multiply_tile(sum[tile], weights, tile, span * 2 + 1, here[c].z, here[c].w);
#endif
#endif
#if EARLY_LOADS
            if (later < ITEMS) {
                here[c] = load_span(rows_at(row_at, later / POLLS, step), later % POLLS * CHUNK + c);
                __syncwarp();  // otherwise the compiler would move the load behind later products
            }
#endif
        }
#if !EARLY_LOADS
        if (later < ITEMS) load_item(here, rows_at(row_at, later / POLLS, step), later % POLLS);
#endif
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
#if SCALED
            const u32 halves = max(most & 0xffffu, most >> 16);
            scales.most[group] = halves ? halves : some << 1 ? 1u : 0u;
            // The factor of the lane's own row, then those of the two rows whose sums it holds. A block that gave up waiting may have
            // read numbers from a marked buffer, so its sums become NaN here.
            const float all = MARKED && patience.lost ? Number::not_a_number() : weights.unit;
            const float unit = all * Number::power_of_two(254 - Number::exponent_of(scales.own[group]));
            const float even = __shfl_sync(EVERY_LANE, unit, 8 * pair), odd = __shfl_sync(EVERY_LANE, unit, 8 * pair + 4);
#else
            const float even = 1.f, odd = 1.f;
#endif
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                out[tile * 16] = sum[tile][0] * even;
                out[tile * 16 + PARTIAL_STRIDE] = sum[tile][1] * odd;
                out[tile * 16 + 8] = sum[tile][2] * even;
                out[tile * 16 + 8 + PARTIAL_STRIDE] = sum[tile][3] * odd;
            }
#endif
        }
    }
#if SCALED
    if (scales.change(row_of)) {
        begin_product(words, row_at, step);
        goto again;
    }
#endif
}

// The number of the partial sums that a warp computes.
__device__ __forceinline__ int own_part() { return own_slice(); }

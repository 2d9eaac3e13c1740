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

constexpr int FRAGMENTS = SCALED ? 1 : 2;              // a lane's, of one tile in one span: as many tensor-core products
constexpr int LENT = TILES - RESIDENT;                 // tiles whose weights do not fit in registers: in shared memory
constexpr int LENT_WORDS = WARPS * LENT * SPANS * FRAGMENTS * 32;  // of 16 bytes

// A lane's weights: RESIDENT tiles in registers, the others at `lent`, which is its own share of shared memory.
struct Weights {
    u32 held[RESIDENT][SPANS * FRAGMENTS][4];
    const uint4* lent;
#if SCALED
    float unit;  // what the warp's weights have to be multiplied with
#endif
};

// Where a lane's batch row comes from in this step: from the exchange, which is polled, or from memory that is taken as it
// is, because it was finished before the launch or because nothing that comes of it is used. What counts was made by
// `narrowed`, or is as if it were.
struct Row {
    const Value* data;  // at the lane's first value
    bool polled, counted;  // `counted` unless nothing comes of it
};

// The first value of a lane's 16 bytes in span `span` of its warp.
__device__ __forceinline__ int depth_of(int span) {
    return ((threadIdx.x >> 5) * SPANS + span) * SPAN + (threadIdx.x & 3) * (SPAN / 4);
}

// The batch row that a lane loads in a group of eight; ONE_ROW is loaded by every eighth lane.
__device__ __forceinline__ int row_of_lane(int group) { return ONE_ROW ? 0 : group * 8 + ((threadIdx.x & 31) >> 2); }

// A lane's weights of one tile in one span, as they lie in memory: for weight rows lane / 4 and the eighth after it in turn,
// along the depth.
struct Pair {
    uint4 half[2];
};

#if SCALED
// Each row of a warp's operands has a scale, a power of two with which its largest value becomes that of CENTRE in fp16.
// Before a row comes, its largest value is not known, so the scale of the last step is taken, and the product is made again
// if it does not fit: with values beyond fp16, or none of LEAST. No value then loses more than 2^-23 of the largest.
constexpr u32 LEAST = 13u << 10, INFINITE = 31u << 10;  // 2^-2; bits of fp16
constexpr int CENTRE = 23;                              // 2^8
constexpr int SMALLEST_SCALE = 17, LARGEST_SCALE = 235, LARGEST_WEIGHT_SCALE = 239;  // 2^-110, 2^108, 2^112
constexpr int FIRST_WEIGHT_SCALE = 139;                 // 2^12
constexpr u32 LEAST_WEIGHT = 17u << 10;                 // 2^2

__device__ __forceinline__ float power(int exponent) { return __uint_as_float((u32)exponent << 23); }

__device__ __forceinline__ u32 largest_finite(uint4 words) {
    auto size = [](u32 word) { return (word & 0x7fffffffu) < 0x7f800000u ? word & 0x7fffffffu : 0u; };
    return max(max(size(words.x), size(words.y)), max(size(words.z), size(words.w)));
}

// Two halves of fp32 as one fragment of fp16.
__device__ __forceinline__ uint4 packed(Pair pair, float scale) {
    auto both = [&](u32 low, u32 high) { return packed_halves(__uint_as_float(low) * scale, __uint_as_float(high) * scale); };
    const uint4 first = pair.half[0], second = pair.half[1];
    return make_uint4(both(first.x, first.z), both(first.y, first.w), both(second.x, second.z), both(second.y, second.w));
}

// The scale of a row whose largest value, with the scale it has, is `most` in fp16.
__device__ __forceinline__ float rescaled(float scale, u32 most) {
    const int exponent = __float_as_uint(scale) >> 23, taken = most >> 10;
    const int shift = most >= INFINITE ? -24 : most == 1 ? 24 : CENTRE - taken;  // 1: too small to be seen
    return power(max(SMALLEST_SCALE, min(LARGEST_SCALE, exponent + shift)));
}
#else
__device__ __forceinline__ uint4 rounded(uint4 words) {
    return make_uint4(rounded(words.x), rounded(words.y), rounded(words.z), rounded(words.w));
}
#endif

#if SCALED
constexpr int ROOM = (65536 / THREADS < 256 ? 65536 / THREADS : 255) - 72;  // registers for weights and loads of them

// Whether pair `number` is the first of those that are loaded at once: as many as there is room for beside those before.
__device__ constexpr bool begins_loads(int number) {
    int first = 0;
    while (first < number) {
        const int held = 4 * (first / TILES * RESIDENT + (first % TILES < RESIDENT ? first % TILES : RESIDENT));
        first += held + 3 * 8 < ROOM ? (ROOM - held) / 8 : 3;
    }
    return first == number;
}
#endif

// What each row of weights is aligned to; the first one is to 16 bytes.
constexpr int ROW_BYTES = SIZE * (int)sizeof(Value);
constexpr int ROW_ALIGNMENT = ROW_BYTES % 16 == 0 ? 16 : ROW_BYTES % 8 == 0 ? 8 : ROW_BYTES % 4 == 0 ? 4 : 2;

// Loads 16 bytes of a row of weights from value k on, zeros beyond its end and where `exists` is not.
__device__ __forceinline__ uint4 load_weight_words(const Value* row, int k, bool exists) {
    u32 words[4] = {0, 0, 0, 0};
    if constexpr (ROW_ALIGNMENT == 16) {
        // Behind a branch, loads would be waited for one by one.
        asm("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %5, 0;\n\t@p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n\t}"
            : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
            : "l"(row + k), "r"((int)(exists && k < SIZE)));
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (!exists) return make_uint4(0, 0, 0, 0);
    constexpr int VALUES = ROW_ALIGNMENT / (int)sizeof(Value);  // of a load
#pragma unroll
    for (int i = 0; i < 16 / ROW_ALIGNMENT; ++i) {
        const Value* const from = row + k + i * VALUES;
        if (k + i * VALUES >= SIZE) continue;
        if constexpr (ROW_ALIGNMENT == 8) {
            const uint2 half = *(const uint2*)from;
            words[2 * i] = half.x, words[2 * i + 1] = half.y;
        } else if constexpr (ROW_ALIGNMENT == 4) {
            words[i] = *(const u32*)from;
        } else {
            words[i / 2] |= (u32)*from << 16 * (i % 2);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Loads the weights once, `pair_at(tile, span)` by pair, after `arrive(span)` for each span in turn; `room` has LENT_WORDS.
template <class Arrive, class PairAt>
__device__ __forceinline__ void load_weights(Weights& weights, uint4* room, Arrive arrive, PairAt pair_at) {
    room += (threadIdx.x >> 5) * LENT * SPANS * FRAGMENTS * 32 + (threadIdx.x & 31);
    weights.lent = room;
#if SCALED
    // Most matrices suit the first scale, and are read once.
    int exponent = FIRST_WEIGHT_SCALE;
again:
    u32 most = 0;
    const float scale = power(exponent);
#endif
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
        arrive(span);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#if SCALED
            // Or else more would be loaded at once than there are registers for.
            if (begins_loads(span * TILES + tile)) __syncwarp();
#endif
            const Pair pair = pair_at(tile, span);
#pragma unroll
            for (int half = 0; half < FRAGMENTS; ++half) {
#if SCALED
                const uint4 fragment = packed(pair, scale);
                most = larger_halves(larger_halves(most, fragment.x), fragment.y);
                most = larger_halves(larger_halves(most, fragment.z), fragment.w);
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
        exponent = min(LARGEST_WEIGHT_SCALE, 268 - (int)(most >> 23));  // the largest becomes 2^14
        if (most && exponent != FIRST_WEIGHT_SCALE) goto again;
    }
    weights.unit = power(254 - exponent);
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
        const bool wanted = !RAGGED || row.counted;  // rows that have ended load nothing
        words[c] = wanted && span < SPANS && (WARPS * SPANS * SPAN <= WIDTH || k < WIDTH) ? load_exchanged(row.data + span * SPAN) : make_uint4(0, 0, 0, 0);
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

using InFlight = uint4[AHEAD][CHUNK];

// Issues the first loads of a step, at the end of the step before: sooner they would only find what is not there yet, and
// keep L2 busy. `row_at(row, step)` says where a batch row of the block comes from.
template <class RowAt>
__device__ __forceinline__ void begin_product(InFlight& words, RowAt row_at, int step) {
#pragma unroll
    for (int item = 0; item < AHEAD; ++item)
        load_item(words[item], row_at(row_of_lane(item / POLLS), step), item % POLLS);
}

#if SCALED
// What a lane knows of its row in each group of eight.
struct Scales {
    float own[NEIGHBOURS];  // what operands are multiplied with, the same for the row's four lanes
    u32 most[NEIGHBOURS];   // the largest operand of the lane's in this step, as bits of fp16: 0 for none, 1 for one too small

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int group = 0; group < NEIGHBOURS; ++group) own[group] = power(CENTRE - 15 + 127);  // for hidden states near 1
    }

    // Whether some row has to be multiplied again, with the scale that it has then.
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

// Makes a lane's operands fp16, in the first two words, and counts the largest.
__device__ __forceinline__ void narrow_operands(uint4& words, float scale, u32& most, u32& some) {
    auto both = [&](u32 low, u32 high) { return packed_halves(__uint_as_float(low) * scale, __uint_as_float(high) * scale); };
    some |= words.x | words.y, some |= words.z | words.w;
    words.x = both(words.x, words.y), words.y = both(words.z, words.w);
    most = larger_halves(larger_halves(most, words.x), words.y);
}
#else
struct Scales {
    __device__ __forceinline__ void start() {}
};
#endif

// Multiplies what has arrived, polls for the rest; `partial` is this warp's share of shared memory.
template <class RowAt>
__device__ __forceinline__ void finish_product(InFlight& words, const Weights& weights, RowAt row_at, int step, float* partial, Patience& patience, Scales& scales) {
    const int row = (threadIdx.x & 31) >> 2, pair = threadIdx.x & 3;
    float sum[TILES][4];
    patience.polls = 0;
#if SCALED
    u32 most = 0, some = 0;
again:
    asm volatile("" : "+r"(step));  // or else every address would be made before the first product, and spilled
    auto row_of = [&](int row) { return row_at(row, step); };
#else
    auto row_of = [&](int row) { return row_at(row, step); };
#endif
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int group = item / POLLS, poll = item % POLLS;
        uint4(&here)[CHUNK] = words[item % AHEAD];
        await_item(here, row_of(row_of_lane(group)), poll, patience);
#if SCALED
        if (poll == 0) most = some = 0;
#pragma unroll
        for (int c = 0; c < CHUNK; ++c) narrow_operands(here[c], scales.own[group], most, some);
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
                multiply_tile(sum[tile], weights, tile, span * FRAGMENTS, here[c].x, here[c].y);
            }
#if !SCALED
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) multiply_tile(sum[tile], weights, tile, span * 2 + 1, here[c].z, here[c].w);
#endif
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
#if SCALED
            const u32 halves = max(most & 0xffffu, most >> 16);
            scales.most[group] = halves ? halves : some << 1 ? 1u : 0u;
            // Of the lane's own row, then of the two rows whose sums it has. What is read of a marked buffer when a wait is given
            // up need not be NaN.
            const float all = MARKED && patience.lost ? __uint_as_float(0x7fc00000u) : weights.unit;
            const float unit = all * power(254 - (int)(__float_as_uint(scales.own[group]) >> 23));
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

// Moments and sums over all hidden units of a batch row, which the blocks of the row exchange in a step.
//
// Numbers go in pairs: a mean and a variance, or two sums. Each block combines those of its units in shared memory and stores
// a pair for each row where all blocks of the row load it. The data is its own flag, as it is for hidden states. This memory
// is used again after two steps, so a word says in its last bit whether the step is one of the first two, of the next two,
// and so on. No block overwrites a pair that another one has not loaded: it stores the pairs of a step after it has loaded
// those of the step before from all blocks, and each block has stored those after it had loaded the ones that are overwritten.
#pragma once
#include "sequence.cuh"

constexpr int PAIRS = WIDEST > 0 ? WIDEST : 1;
constexpr int QUADS = UNITS / 4;                                              // groups of four neighbouring units of a block
constexpr int BLOCKS = (HIDDEN + UNITS_TOGETHER - 1) / UNITS_TOGETHER * SPLIT;  // the blocks of a row
constexpr int PAIRED_BLOCKS = (BLOCKS + 1) / 2;                               // a load has the pairs of two blocks
constexpr int RING_PAIRS = 2 * PLACES * PAIRS * ROWS * PAIRED_BLOCKS * 2;     // the pairs of the memory of a row group

// A mean and a sum of squares about the mean, or two sums.
struct TwoNumbers {
    float first, second;
};

// The number of units from `first` on, at most `most`, that belong to the layer.
__device__ __forceinline__ int units_from(int first, int most) { return min(max(SIZE - first, 0), most); }

// The sum over LANES neighbouring lanes, the same in all of them.
template <int LANES>
__device__ __forceinline__ float over_lanes(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(EVERY_LANE, value, distance);
    return value;
}

// Combines pairs in COUNT registers of LANES neighbouring lanes: sums, or the means and the sums of squares about the means of
// `units[i]` units each, with `share` = 1 / (the number of all units).
template <bool MOMENTS, int LANES, int COUNT>
__device__ __forceinline__ TwoNumbers combined(const TwoNumbers (&parts)[COUNT], const int (&units)[COUNT], float share) {
    float first = 0.f, second = 0.f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) first += MOMENTS ? units[i] * parts[i].first : parts[i].first;
    first = over_lanes<LANES>(first);
    if (MOMENTS) first *= share;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float distance = parts[i].first - first;
        second += MOMENTS ? fmaf(units[i] * distance, distance, parts[i].second) : parts[i].second;
    }
    return {first, over_lanes<LANES>(second)};
}

// The lanes that combine the pairs of all blocks: as many as there are for each of ITEMS pairs.
__device__ constexpr int lanes_of(int items) {
    int lanes = 32;
    while (lanes > 4 && (lanes * items > THREADS || lanes > PAIRED_BLOCKS)) lanes /= 2;
    return lanes;
}

// What the generated code of a cell calls for the cells of a thread; units that do not exist are left out of all numbers.
struct RowUnits {
    static constexpr float reciprocal = 1.f / SIZE;
    static constexpr int SHARED_PAIRS = PLACES * PAIRS * ROWS;

    u32* ring;           // [2, PLACES, PAIRS, ROWS, PAIRED_BLOCKS, 2] pairs, all bits 1 beforehand
    TwoNumbers* results;      // in shared memory: [PLACES, PAIRS, ROWS]
    int first_unit;
    u32 step;            // counts the steps of a block, of all groups
    TwoNumbers* quads;        // in shared memory: [PAIRS, ROWS, QUADS], unused between the first barrier of a step and its end
    Patience* patience;

    __device__ __forceinline__ bool exists(int cell) const {
        const Place at = place_of(cell);
        return at.exists && first_unit + at.unit < SIZE;
    }

    template <int PLACE, int COUNT>
    __device__ __forceinline__ void merge(Moments (&moments)[CELLS][COUNT]) {
        TwoNumbers pairs[CELLS][COUNT];
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) pairs[cell][i] = {moments[cell][i].mean, moments[cell][i].variance};
        exchange<PLACE, true>(pairs);
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) moments[cell][i] = {pairs[cell][i].first, pairs[cell][i].second * reciprocal};
    }

    template <int PLACE, int COUNT>
    __device__ __forceinline__ void add_up(float (&sums)[CELLS][COUNT]) {
        TwoNumbers pairs[CELLS][(COUNT + 1) / 2];
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) pairs[cell][i / 2] = {sums[cell][i], i + 1 < COUNT ? sums[cell][i + 1 < COUNT ? i + 1 : i] : 0.f};
        exchange<PLACE, false>(pairs);
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) sums[cell][i] = i % 2 ? pairs[cell][i / 2].second : pairs[cell][i / 2].first;
    }

    // Replaces the pairs of units by those of their rows.
    template <int PLACE, bool MOMENTS, int COUNT>
    __device__ __forceinline__ void exchange(TwoNumbers (&pairs)[CELLS][COUNT]) {
        constexpr int ITEMS = COUNT * ROWS, LANES = lanes_of(ITEMS), AT_ONCE = THREADS / LANES;
        constexpr int LOADS = (PAIRED_BLOCKS + LANES - 1) / LANES;
        static_assert(COUNT <= PAIRS && PLACE < PLACES, "as the cell's code states");
        u32* const slots = ring + (((step & 1) * PLACES + PLACE) * PAIRS * ROWS) * PAIRED_BLOCKS * 4;
        const u32 mark = step >> 1 & 1;  // differs from the bit of the words that this step overwrites
        in_quads<MOMENTS>(pairs);
        __syncthreads();
#pragma unroll
        for (int first = 0; first < ITEMS; first += AT_ONCE) {
            const int item = first + (int)threadIdx.x / LANES;
            if (threadIdx.x % LANES || item >= ITEMS) continue;
            const TwoNumbers own = of_block<MOMENTS>(item);
            store_exchanged((Value*)(slots + (item * PAIRED_BLOCKS * 2 + blockIdx.x) * 2), marked_words(own, mark));
        }
        pause();
        patience->polls = 0;
#pragma unroll
        for (int first = 0; first < ITEMS; first += AT_ONCE) {
            const int item = first + (int)threadIdx.x / LANES, lane = threadIdx.x % LANES;
            const bool wanted = item < ITEMS;
            const u32* const from = slots + (wanted ? item : 0) * PAIRED_BLOCKS * 4;
            uint4 words[LOADS];
            bool missing = true;
            while (missing) {
                bool own = false;
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    const int two = lane + i * LANES;
                    words[i] = wanted && two < PAIRED_BLOCKS ? load_exchanged((const Value*)(from + two * 4)) : make_uint4(mark, mark, mark, mark);
                }
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    const bool odd = lane + i * LANES == PAIRED_BLOCKS - 1 && BLOCKS % 2;  // there is no second block
                    const u32 differs = (words[i].x ^ mark) | (words[i].y ^ mark) | (odd ? 0u : (words[i].z ^ mark) | (words[i].w ^ mark));
                    own = own || differs & 1u;
                }
                missing = __any_sync(EVERY_LANE, own) && patience->is_left();
            }
            TwoNumbers parts[2 * LOADS];
            int units[2 * LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const int block = 2 * (lane + i * LANES);
                units[2 * i] = units_from(block * UNITS, UNITS), units[2 * i + 1] = units_from((block + 1) * UNITS, UNITS);
                parts[2 * i] = pair_of(words[i].x, words[i].y, block < BLOCKS);
                parts[2 * i + 1] = pair_of(words[i].z, words[i].w, block + 1 < BLOCKS);
            }
            TwoNumbers all = combined<MOMENTS, LANES>(parts, units, reciprocal);
            // Other words than those of this step may have been loaded.
            if (patience->lost) all = {Float32::not_a_number(), Float32::not_a_number()};
            if (wanted && lane == 0) results[PLACE * PAIRS * ROWS + item] = all;
        }
        __syncthreads();
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) pairs[cell][i] = results[(PLACE * PAIRS + i) * ROWS + (at.exists ? at.row : 0)];
        }
    }

    // Waits until the pairs of other blocks, which store them at about the same time, have probably arrived: a load that comes
    // too early costs another round trip.
    __device__ __forceinline__ static void pause() {
        pause_since(clock64());
    }

    // Stores the pairs of four neighbouring units, which four neighbouring lanes compute.
    template <bool MOMENTS, int COUNT>
    __device__ __forceinline__ void in_quads(const TwoNumbers (&pairs)[CELLS][COUNT]) const {
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            if (!warp_owns(cell)) continue;
            const Place at = place_of(cell);
            const bool real = exists(cell);
            const int units[1] = {real};
            const float share = SIZE % 4 == 0 ? 0.25f : 1.f / max(units_from(first_unit + (at.unit & ~3), 4), 1);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const TwoNumbers own[1] = {{real ? pairs[cell][i].first : 0.f, real ? pairs[cell][i].second : 0.f}};
                const TwoNumbers four = combined<MOMENTS, 4>(own, units, share);
                if (at.exists && threadIdx.x % 4 == 0) quads[(i * ROWS + at.row) * QUADS + at.unit / 4] = four;
            }
        }
    }

    // The pair of the block's units of a row.
    template <bool MOMENTS>
    __device__ __forceinline__ TwoNumbers of_block(int item) const {
        TwoNumbers parts[QUADS];
        int units[QUADS];
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            parts[quad] = quads[item * QUADS + quad];
            units[quad] = units_from(first_unit + quad * 4, 4);
        }
        return combined<MOMENTS, 1>(parts, units, 1.f / max(units_from(first_unit, UNITS), 1));
    }

    __device__ __forceinline__ static uint2 marked_words(TwoNumbers pair, u32 mark) {
        auto word = [&](float value) { return (Float32::canonical_bits(value) & ~1u) | mark; };
        return make_uint2(word(pair.first), word(pair.second));
    }

    __device__ __forceinline__ static TwoNumbers pair_of(u32 first, u32 second, bool exists) {
        return exists ? TwoNumbers{Float32::from_bits(first & ~1u), Float32::from_bits(second & ~1u)} : TwoNumbers{0.f, 0.f};
    }
};

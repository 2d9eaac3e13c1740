// Moments and sums over all hidden units of a batch row, which the blocks of the row exchange in a step.
//
// Numbers go in pairs: a mean and a variance, or two sums. Each block combines those of its units in shared memory and stores
// a pair for each row where all blocks of the row load it. The data is its own flag, as it is for hidden states. This memory
// is used again after two steps, so a word says in its last bit whether the step is one of the first two, of the next two,
// and so on. No block overwrites a pair that another one has not loaded: it stores the pairs of a step after it has loaded
// those of the step before from all blocks, and each block has stored those after it had loaded the ones that are overwritten.
//
// The including file defines PLACES, the number of places in a step where units are combined, and WIDEST, the largest number
// of pairs in one of them.
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
    TwoNumbers* quads;        // in shared memory: [PAIRS, ROWS, QUADS], unused from the barrier before `offer` to the end of a step
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
        in_quads<true, 0, COUNT>(pairs);
        exchange<PLACE, true, COUNT>();
        load_results<PLACE, 0, COUNT>(pairs);
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) moments[cell][i] = {pairs[cell][i].first, pairs[cell][i].second * reciprocal};
    }

    template <int PLACE, int COUNT>
    __device__ __forceinline__ void add_up(float (&sums)[CELLS][COUNT]) {
        store_sums<0, COUNT>(sums);
        exchange<PLACE, false, pairs_of(COUNT)>();
        load_sums<PLACE, 0, COUNT>(sums);
    }

    // Gets the numbers of units that `add_up_with_offered` will add up in this step. It can be called before the first barrier
    // of the step, but after a barrier that follows all exchanges of the step before.
    __device__ __forceinline__ void offer(const float (&numbers)[CELLS][JACOBIAN + 1]) const { store_sums<0, JACOBIAN>(numbers); }

    // There is a barrier between `offer` and this call.
    template <int PLACE, int COUNT>
    __device__ __forceinline__ void add_up_with_offered(float (&sums)[CELLS][COUNT], float (&offered)[CELLS][JACOBIAN + 1]) {
        constexpr int FIRST = pairs_of(JACOBIAN);
        store_sums<FIRST, COUNT>(sums);
        exchange<PLACE, false, FIRST + pairs_of(COUNT)>();
        load_sums<PLACE, 0, JACOBIAN>(offered);
        load_sums<PLACE, FIRST, COUNT>(sums);
    }

    __device__ static constexpr int pairs_of(int numbers) { return (numbers + 1) / 2; }

    // Stores sums of the first COUNT numbers of units as the pairs from FIRST on.
    template <int FIRST, int COUNT, int SIZE_OF_ALL>
    __device__ __forceinline__ void store_sums(const float (&numbers)[CELLS][SIZE_OF_ALL]) const {
        TwoNumbers pairs[CELLS][pairs_of(COUNT) + 1];
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) pairs[cell][i / 2] = {numbers[cell][i], i + 1 < COUNT ? numbers[cell][i + 1 < COUNT ? i + 1 : i] : 0.f};
        in_quads<false, FIRST, pairs_of(COUNT)>(pairs);
    }

    // Replaces the first COUNT numbers of units by their sums over all units.
    template <int PLACE, int FIRST, int COUNT, int SIZE_OF_ALL>
    __device__ __forceinline__ void load_sums(float (&numbers)[CELLS][SIZE_OF_ALL]) const {
        TwoNumbers pairs[CELLS][pairs_of(COUNT) + 1];
        load_results<PLACE, FIRST, pairs_of(COUNT)>(pairs);
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell)
#pragma unroll
            for (int i = 0; i < COUNT; ++i) numbers[cell][i] = i % 2 ? pairs[cell][i / 2].second : pairs[cell][i / 2].first;
    }

    // Combines COUNT pairs of all units, from the pairs of four units to those of their rows.
    template <int PLACE, bool MOMENTS, int COUNT>
    __device__ __forceinline__ void exchange() {
        constexpr int ITEMS = COUNT * ROWS, LANES = lanes_of(ITEMS), AT_ONCE = THREADS / LANES;
        constexpr int LOADS = (PAIRED_BLOCKS + LANES - 1) / LANES;
        // Rounds of loads that are in flight together, with at most eight loads of 16 bytes a thread, or those of one round.
        constexpr int ROUNDS = (ITEMS + AT_ONCE - 1) / AT_ONCE, FIT = LOADS < 8 ? 8 / LOADS : 1, TOGETHER = ROUNDS < FIT ? ROUNDS : FIT;
        static_assert(COUNT <= PAIRS && PLACE < PLACES, "as the cell's code states");
        u32* const slots = ring + (((step & 1) * PLACES + PLACE) * PAIRS * ROWS) * PAIRED_BLOCKS * 4;
        const u32 mark = step >> 1 & 1;  // differs from the bit of the words that this step overwrites
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
        const int lane = threadIdx.x % LANES;
#pragma unroll
        for (int first = 0; first < ITEMS; first += AT_ONCE * TOGETHER) {
            auto item_of = [&](int round) { return first + round * AT_ONCE + (int)threadIdx.x / LANES; };
            uint4 words[TOGETHER][LOADS];
            bool missing = true;
            while (missing) {
                bool own = false;
#pragma unroll
                for (int round = 0; round < TOGETHER; ++round) {
                    const bool wanted = item_of(round) < ITEMS;
                    const u32* const from = slots + (wanted ? item_of(round) : 0) * PAIRED_BLOCKS * 4;
#pragma unroll
                    for (int i = 0; i < LOADS; ++i) {
                        const int two = lane + i * LANES;
                        words[round][i] = wanted && two < PAIRED_BLOCKS ? load_exchanged((const Value*)(from + two * 4)) : make_uint4(mark, mark, mark, mark);
                    }
                }
#pragma unroll
                for (int round = 0; round < TOGETHER; ++round)
#pragma unroll
                    for (int i = 0; i < LOADS; ++i) {
                        const uint4 own_words = words[round][i];
                        const bool odd = lane + i * LANES == PAIRED_BLOCKS - 1 && BLOCKS % 2;  // there is no second block
                        const u32 differs = (own_words.x ^ mark) | (own_words.y ^ mark) | (odd ? 0u : (own_words.z ^ mark) | (own_words.w ^ mark));
                        own = own || differs & 1u;
                    }
                missing = __any_sync(EVERY_LANE, own) && patience->is_left();
            }
#pragma unroll
            for (int round = 0; round < TOGETHER; ++round) {
                TwoNumbers parts[2 * LOADS];
                int units[2 * LOADS];
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    const int block = 2 * (lane + i * LANES);
                    units[2 * i] = units_from(block * UNITS, UNITS), units[2 * i + 1] = units_from((block + 1) * UNITS, UNITS);
                    parts[2 * i] = pair_of(words[round][i].x, words[round][i].y, block < BLOCKS);
                    parts[2 * i + 1] = pair_of(words[round][i].z, words[round][i].w, block + 1 < BLOCKS);
                }
                TwoNumbers all = combined<MOMENTS, LANES>(parts, units, reciprocal);
                // Other words than those of this step may have been loaded.
                if (patience->lost) all = {Float32::not_a_number(), Float32::not_a_number()};
                if (item_of(round) < ITEMS && lane == 0) results[PLACE * PAIRS * ROWS + item_of(round)] = all;
            }
        }
        __syncthreads();
    }

    // The pairs of the rows of all cells, from pair FIRST on.
    template <int PLACE, int FIRST, int COUNT, int SIZE_OF_ALL>
    __device__ __forceinline__ void load_results(TwoNumbers (&pairs)[CELLS][SIZE_OF_ALL]) const {
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) pairs[cell][i] = results[(PLACE * PAIRS + FIRST + i) * ROWS + (at.exists ? at.row : 0)];
        }
    }

    // Waits until the pairs of other blocks, which store them at about the same time, have probably arrived: a load that comes
    // too early costs another round trip.
    __device__ __forceinline__ static void pause() {
        const long long begin = clock64();
        while (clock64() - begin < PAUSE) {}
    }

    // Stores the first COUNT pairs of four neighbouring units, which four neighbouring lanes compute, as those from FIRST on.
    template <bool MOMENTS, int FIRST, int COUNT, int SIZE_OF_ALL>
    __device__ __forceinline__ void in_quads(const TwoNumbers (&pairs)[CELLS][SIZE_OF_ALL]) const {
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
                if (at.exists && threadIdx.x % 4 == 0) quads[((FIRST + i) * ROWS + at.row) * QUADS + at.unit / 4] = four;
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

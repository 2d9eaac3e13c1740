// Moments and sums over all hidden units of a batch row, which the blocks of the row exchange in a step.
//
// Numbers go in pairs: a mean and a variance, or two sums. Each block combines those of its units in shared memory and stores
// a pair for each row where all blocks of the row load it. The data is its own flag, as it is for hidden states. This memory
// is used again after two steps, so a word says in its last bit whether the step is one of the first two, of the next two,
// and so on. No block overwrites a pair that another one has not loaded: it stores the pairs of a step after it has loaded
// those of the step before from all blocks, and each block has stored those after it had loaded the ones that are overwritten.
//
// The pairs of many rows from many blocks take long to load. Where a block would load more than MOST_BYTES, each item (one pair of
// one row) has an owner among the blocks, which alone loads the item's pairs from all blocks, combines them and stores the total;
// all blocks, the owner too, then load the totals, which have the same marks in memory of their own. No block overwrites a pair
// that its owner has not loaded: it stores the pairs of a step after it has loaded all totals of the step before, which their
// owners had stored after they had loaded all pairs of that step. No owner overwrites a total that a block has not loaded: it
// stores the totals of a step after it has loaded pairs of this step from all blocks, and each block has stored those after it had
// loaded all totals of the step before. This holds for blocks without items, too, which load no pairs of others.
#pragma once
#include "sequence.cuh"

constexpr int PAIRS = WIDEST > 0 ? WIDEST : 1;
constexpr int QUADS = UNITS / 4;                                              // groups of four neighbouring units of a block
constexpr int BLOCKS = (HIDDEN + UNITS_TOGETHER - 1) / UNITS_TOGETHER * SPLIT;  // the blocks of a row
constexpr int PAIRED_BLOCKS = (BLOCKS + 1) / 2;                               // a load has the pairs of two blocks
constexpr int BLOCK_PAIRS = 2 * PLACES * PAIRS * ROWS * PAIRED_BLOCKS * 2;    // the pairs of blocks in the memory of a row group
constexpr int RING_PAIRS = BLOCK_PAIRS + 2 * PLACES * PAIRS * ROWS;           // and with the totals behind them
static_assert(2 * RING_PAIRS == RING_WORDS, "the same as in tiling.py");

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

    u32* ring;           // [2, PLACES, PAIRS, ROWS, PAIRED_BLOCKS, 2] pairs, then [2, PLACES, PAIRS, ROWS] totals, all bits 1 beforehand
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
        static_assert(COUNT <= PAIRS && PLACE < PLACES, "as the cell's code states");
        const int part = ((step & 1) * PLACES + PLACE) * PAIRS * ROWS;
        u32* const slots = ring + part * PAIRED_BLOCKS * 4;
        u32* const totals = ring + BLOCK_PAIRS * 2 + part * 2;
        TwoNumbers* const found = results + PLACE * PAIRS * ROWS;
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
        if constexpr (ITEMS * PAIRED_BLOCKS * 16 > MOST_BYTES) {
            store_totals<MOMENTS, ITEMS>(slots, totals, mark);
            pause();
            load_totals<ITEMS>(totals, found, mark);
        } else {
#pragma unroll
            for (int first = 0; first < ITEMS; first += AT_ONCE) {
                const int item = first + (int)threadIdx.x / LANES;
                const TwoNumbers total = of_blocks<MOMENTS, LANES>(slots, item, item < ITEMS, mark);
                if (item < ITEMS && threadIdx.x % LANES == 0) found[item] = total;
            }
        }
        __syncthreads();
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) pairs[cell][i] = found[i * ROWS + (at.exists ? at.row : 0)];
        }
    }

    // Stores the totals of the block's items.
    template <bool MOMENTS, int ITEMS>
    __device__ __forceinline__ void store_totals(const u32* slots, u32* totals, u32 mark) {
        constexpr int MOST = (ITEMS + BLOCKS - 1) / BLOCKS;  // items of a block
        constexpr int LANES = lanes_of(MOST), AT_ONCE = THREADS / LANES;
#pragma unroll
        for (int first = 0; first < MOST; first += AT_ONCE) {
            if (first + (int)(threadIdx.x & ~31) / LANES >= MOST) continue;  // the whole warp
            const int number = first + (int)threadIdx.x / LANES, item = blockIdx.x + number * BLOCKS;
            const bool wanted = number < MOST && item < ITEMS;
            const TwoNumbers total = of_blocks<MOMENTS, LANES>(slots, item, wanted, mark);
            if (wanted && threadIdx.x % LANES == 0) store_exchanged((Value*)(totals + item * 2), marked_words(total, mark));
        }
    }

    // Loads the totals of all items into shared memory, those of two neighbouring items at a time.
    template <int ITEMS>
    __device__ __forceinline__ void load_totals(const u32* totals, TwoNumbers* found, u32 mark) {
        constexpr int LOADS = (ITEMS / 2 + THREADS - 1) / THREADS;
        static_assert(ITEMS % 2 == 0, "a load has the totals of two items");
        if ((int)(threadIdx.x & ~31) >= ITEMS / 2) return;  // the whole warp
        auto item = [&](int i) { return 2 * ((int)threadIdx.x + i * THREADS); };
        uint4 words[LOADS];
        await(words, mark, [&](int i) { return item(i) < ITEMS ? totals + item(i) * 2 : nullptr; }, [](int) { return true; });
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (item(i) >= ITEMS) continue;
            found[item(i)] = known(pair_of(words[i].x, words[i].y, true));
            found[item(i) + 1] = known(pair_of(words[i].z, words[i].w, true));
        }
    }

    // The pair of the units of all blocks, which LANES neighbouring lanes load and combine.
    template <bool MOMENTS, int LANES>
    __device__ __forceinline__ TwoNumbers of_blocks(const u32* slots, int item, bool wanted, u32 mark) {
        constexpr int LOADS = (PAIRED_BLOCKS + LANES - 1) / LANES;
        const int lane = threadIdx.x % LANES;
        const u32* const from = slots + (wanted ? item : 0) * PAIRED_BLOCKS * 4;
        uint4 words[LOADS];
        await(
            words, mark,
            [&](int i) { return wanted && lane + i * LANES < PAIRED_BLOCKS ? from + (lane + i * LANES) * 4 : nullptr; },
            [&](int i) { return lane + i * LANES < PAIRED_BLOCKS - 1 || BLOCKS % 2 == 0; });
        TwoNumbers parts[2 * LOADS];
        int units[2 * LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int block = 2 * (lane + i * LANES);
            units[2 * i] = units_from(block * UNITS, UNITS), units[2 * i + 1] = units_from((block + 1) * UNITS, UNITS);
            parts[2 * i] = pair_of(words[i].x, words[i].y, block < BLOCKS);
            parts[2 * i + 1] = pair_of(words[i].z, words[i].w, block + 1 < BLOCKS);
        }
        return known(combined<MOMENTS, LANES>(parts, units, reciprocal));
    }

    // Loads words of two pairs each until all have this step's mark. `place` returns null where there is nothing to load, and
    // `is_whole` whether the second pair exists, too.
    template <int LOADS, class Address, class Whole>
    __device__ __forceinline__ void await(uint4 (&words)[LOADS], u32 mark, Address place, Whole is_whole) {
        patience->polls = 0;
        bool missing = true;
        while (missing) {
            bool own = false;
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const u32* const from = place(i);
                words[i] = from ? load_exchanged((const Value*)from) : make_uint4(mark, mark, mark, mark);
            }
#pragma unroll
            for (int i = 0; i < LOADS; ++i) {
                const u32 differs = (words[i].x ^ mark) | (words[i].y ^ mark) | (is_whole(i) ? (words[i].z ^ mark) | (words[i].w ^ mark) : 0u);
                own = own || differs & 1u;
            }
            missing = __any_sync(EVERY_LANE, own) && patience->is_left();
        }
    }

    // A pair that was loaded, or NaN if the thread gave up: it may have loaded other words than those of this step.
    __device__ __forceinline__ TwoNumbers known(TwoNumbers pair) const {
        return patience->lost ? TwoNumbers{Float32::not_a_number(), Float32::not_a_number()} : pair;
    }

    // Waits until the pairs of other blocks, which store them at about the same time, have probably arrived: a load that comes
    // too early costs another round trip.
    __device__ __forceinline__ static void pause() {
        const long long begin = clock64();
        while (clock64() - begin < PAUSE) {}
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

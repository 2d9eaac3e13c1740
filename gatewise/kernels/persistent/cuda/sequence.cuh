// The cells that a thread computes, and the batch rows of a block with their lengths.
#pragma once
#ifndef DISTRIBUTED
#define DISTRIBUTED 0
#endif
// Whether rows are interleaved in the buffer through which blocks exchange values: the first 64 bytes of eight rows lie side by
// side, then their second 64 bytes, and so on. A load of a warp, which takes 64 bytes of eight rows, is then four whole lines of
// the cache, and not half of each of eight lines. Row i there is the i-th row in the order of the groups, not batch row i.
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
// With INTERLEAVED, the loads of rows beyond the batch that are saved. 0: none. 1: those in the last eight rows of a group. 2, in
// backward passes only: also those of eight rows that are all beyond the batch. It is 0 with RAGGED, where rows that have ended
// are not loaded anyway.
#ifndef SKIPPED_BEYOND
#define SKIPPED_BEYOND 0
#endif
#if WARPGROUPS
#include "warpgroup_product.cuh"
#elif DISTRIBUTED
#include "distributed.cuh"
#else
#include "product.cuh"
#endif

// The blocks that fit in a multiprocessor at the same time.
#ifndef RESIDENT_BLOCKS
#define RESIDENT_BLOCKS 1
#endif

// The steps whose partial sums are in shared memory: 2, so that the warps that are first in a step write theirs while others still
// read those of the step before; or 1, where two leave no room for many batch rows, with a barrier at the end of each step.
#ifndef BUFFERS
#define BUFFERS 2
#endif

// Called after the last read of the partial sums of a step.
__device__ __forceinline__ void barrier_if_one_buffer() {
#if BUFFERS == 1
    __syncthreads();
#endif
}

// The total of the partial sums of four neighbouring values of a batch row, in shared memory [PARTS, ROWS, PARTIAL_STRIDE].
__device__ __forceinline__ float4 summed(const float* partials, int row, int column) {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int number = 0; number < PARTS; ++number) {
        const float4 part = *(const float4*)(partials + number * PARTIAL_FLOATS + row * PARTIAL_STRIDE + column);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    return total;
}

constexpr int CELLS = (ROWS * UNITS + THREADS - 1) / THREADS;  // the cells of a thread

// The blocks of a direction share the hidden units, padded to whole blocks or clusters. Two kinds of units at the end do not
// belong to the layer: those below HIDDEN have a place in tensors, and their weights are zeros; those from HIDDEN on have no
// place. Every load of weights is guarded by `is_unit`, and every access to a tensor whose rows have HIDDEN values by
// `has_place`, and by nothing else, because an access without its guard is out of bounds.
constexpr int UNITS_TOGETHER = UNITS * SPLIT;
constexpr bool ONLY_UNITS = SIZE % UNITS_TOGETHER == 0 && SIZE == HIDDEN;
__device__ __forceinline__ bool is_unit(int unit) { return ONLY_UNITS || unit < SIZE; }
__device__ __forceinline__ bool has_place(int unit) { return HIDDEN % UNITS_TOGETHER == 0 || unit < HIDDEN; }

// The number of steps by which a cell's inputs are loaded ahead. In float32 they need twice the registers, and the steps of
// blocks with several cells a thread are long.
#if SCALED
constexpr int EARLIER = CELLS > 1 ? 1 : 2;
#else
constexpr int EARLIER = 2;
#endif

// The values of a later step are prefetched into the second-level cache, which does not hold those of long sequences.
constexpr int FETCHED_AHEAD = 8;  // steps

// A cell of a block: one hidden unit of one batch row. Four neighbouring lanes compute four neighbouring units of a row.
struct Place {
    int row, unit;
    bool exists;
};

__device__ __forceinline__ Place place_of(int cell) {
    const int index = threadIdx.x + cell * THREADS;
    return {index / UNITS, index % UNITS, (cell + 1) * THREADS <= ROWS * UNITS || index < ROWS * UNITS};
}

// Whether any lane of the warp computes the cell with this index; the same for all its lanes.
__device__ __forceinline__ bool warp_owns(int cell) {
    return (cell + 1) * THREADS <= ROWS * UNITS || (int)(threadIdx.x & ~31) + cell * THREADS < ROWS * UNITS;
}

// The address of step t in a tensor with `values` values a step. Only the product is computed in 64 bits, because addresses are
// computed in every step.
__device__ __forceinline__ Value* step_of(Value* tensor, int t, u32 values) { return (Value*)((char*)tensor + (u64)(u32)t * (u32)(values * sizeof(Value))); }
__device__ __forceinline__ const Value* step_of(const Value* tensor, int t, u32 values) {
    return (const Value*)((const char*)tensor + (u64)(u32)t * (u32)(values * sizeof(Value)));
}

// The batch rows of a group, and the step at which each of them ends: `time` for all rows unless RAGGED, and 0 for rows beyond
// the batch.
struct Ends {
    const int* rows;  // in shared memory: [ROWS] ends, then [ROWS] batch rows
    int time, first_row, batch;

    // The batch row.
    __device__ __forceinline__ int batch_row(int row) const {
#if RAGGED
        return rows[ROWS + row];
#else
        return first_row + row;
#endif
    }

    __device__ __forceinline__ int of(int row) const {
#if RAGGED
        return rows[row];
#else
        return first_row + row < batch ? time : 0;
#endif
    }
};

// Reads the batch rows of a group and their lengths, of which `skipped` steps are before the first one here; returns the largest
// end.
__device__ __forceinline__ int read_ends(int* rows, const i64* lengths, const int* order, int skipped, int first_row, int batch, int time) {
#if RAGGED
    __syncthreads();
    for (int row = threadIdx.x; row < ROWS; row += THREADS) {
        const int at = min(first_row + row, batch - 1), place = order ? order[at] : at;
        rows[row] = first_row + row < batch ? (int)max((i64)0, min((i64)time, lengths[place] - skipped)) : 0;
        rows[ROWS + row] = place;
    }
    __syncthreads();
    int longest = 0;
    for (int row = 0; row < ROWS; ++row) longest = max(longest, rows[row]);
    return longest;
#else
    return time;
#endif
}

#if RAGGED
// Writes zeros to the steps after the end of all rows of a group: the block's units of a tensor with `step_values` values a step
// and `row_values` values a row.
__device__ __forceinline__ void fill_beyond(Value* tensor, u32 step_values, u32 row_values, const Ends& ends, int first_unit, int steps) {
    const FourValues zeros = four_zeros();
    constexpr int ITEMS = ROWS * UNITS / 4, BESIDE = ITEMS < THREADS ? THREADS / ITEMS : 1;  // steps at the same time
    for (int item = threadIdx.x; item < ITEMS * BESIDE; item += THREADS) {
        const int row = item / (UNITS / 4) % ROWS, unit = first_unit + item % (UNITS / 4) * 4;
        if (ends.first_row + row >= ends.batch || unit >= HIDDEN) continue;
        Value* const column = tensor + ends.batch_row(row) * row_values + unit;
#pragma unroll 4
        for (int t = steps + item / ITEMS; t < ends.time; t += BESIDE) *(FourValues*)step_of(column, t, step_values) = zeros;
    }
}
#endif

// The group of rows that a block computes in its turn `turn`. The longest rows come first, and blocks take groups in alternating
// order, so that all blocks have about the same number of steps.
__device__ __forceinline__ int group_of(int turn) {
    return turn * gridDim.y + (RAGGED && turn % 2 ? gridDim.y - 1 - blockIdx.y : blockIdx.y);
}

// Reads the sums of both biases of the block's units, from `first_unit` on, or zeros without biases; they are visible to all
// threads after the next barrier.
__device__ __forceinline__ void read_biases(float4 (&biases)[UNITS], const Value* bias_ih, const Value* bias_hh, int first_unit) {
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) {
        auto bias = [&](int sum) { return bias_of(bias_ih, bias_hh, sum, first_unit + unit); };
        biases[unit] = make_float4(bias(0), bias(1), bias(2), bias(3));
    }
}

// Which rows a block works on, how long they are, and which cells a thread owns.
#pragma once
#include "product.cuh"

constexpr int CELLS = (ROWS * UNITS + THREADS - 1) / THREADS;  // of one thread

// How many steps ahead a cell's inputs are loaded. In float32 they take twice the registers, and blocks of several cells a
// thread have long steps.
#if SCALED
constexpr int EARLIER = CELLS > 1 ? 1 : 2;
#else
constexpr int EARLIER = 2;
#endif

// A cell of a block: one hidden unit of one batch row. Four neighbouring lanes own four neighbouring units of a row.
struct Place {
    int row, unit;
    bool exists;
};

__device__ __forceinline__ Place place_of(int cell) {
    const int index = threadIdx.x + cell * THREADS;
    return {index / UNITS, index % UNITS, (cell + 1) * THREADS <= ROWS * UNITS || index < ROWS * UNITS};
}

// Whether any lane of the warp owns such a cell; the same for all its lanes.
__device__ __forceinline__ bool warp_owns(int cell) {
    return (cell + 1) * THREADS <= ROWS * UNITS || (int)(threadIdx.x & ~31) + cell * THREADS < ROWS * UNITS;
}

// Where step t begins in a tensor with so many values a step: in 32 bits but for the product, as addresses are made in
// every step.
__device__ __forceinline__ Value* step_of(Value* tensor, int t, u32 values) { return (Value*)((char*)tensor + (u64)(u32)t * (u32)(values * sizeof(Value))); }
__device__ __forceinline__ const Value* step_of(const Value* tensor, int t, u32 values) {
    return (const Value*)((const char*)tensor + (u64)(u32)t * (u32)(values * sizeof(Value)));
}

// Where each of the block's rows ends: `time` for all of them unless RAGGED, 0 beyond the batch.
struct Ends {
    const int* rows;  // [ROWS] in shared memory
    int time, rows_left;

    __device__ __forceinline__ int of(int row) const {
#if RAGGED
        return rows[row];
#else
        return row < rows_left ? time : 0;
#endif
    }
};

// Reads the lengths of a group's rows, which count from `skipped` steps before the first one here; returns the longest.
__device__ __forceinline__ int read_ends(int* rows, const i64* lengths, int skipped, int first_row, int batch, int time) {
#if RAGGED
    __syncthreads();
    for (int row = threadIdx.x; row < ROWS; row += THREADS)
        rows[row] = first_row + row < batch ? (int)max((i64)0, min((i64)time, lengths[first_row + row] - skipped)) : 0;
    __syncthreads();
    int longest = 0;
    for (int row = 0; row < ROWS; ++row) longest = max(longest, rows[row]);
    return longest;
#else
    return time;
#endif
}

// Reads the sums of both biases of the block's units, `first_unit` and those after it; zeros without biases. They are there
// after the next barrier.
__device__ __forceinline__ void read_biases(float4 (&biases)[UNITS], const Value* bias_ih, const Value* bias_hh, int first_unit) {
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) {
        auto bias = [&](int gate) {
            const int at = gate * SIZE + first_unit + unit;
            return bias_ih && first_unit + unit < SIZE ? widened(bias_ih[at]) + widened(bias_hh[at]) : 0.f;
        };
        biases[unit] = make_float4(bias(0), bias(1), bias(2), bias(3));
    }
}

// Shared memory of the passes of any cell, besides that of the product: parameters and biases of the block's units, and values
// of its rows that are loaded a step ahead.
#pragma once
#include "row_sums.cuh"
#include "statistics.cuh"

constexpr int UNIT_FLOATS = SUMS + PARAMETERS;                         // for each unit
constexpr int ROW_FLOATS = 2 * RowUnits::SHARED_PAIRS / ROWS + 2 * STATISTICS;  // for each row

// The floats of a unit that do not change: biases [SUMS, UNITS] and parameters [PARAMETERS, UNITS].
struct UnitValues {
    float* values;

    __device__ __forceinline__ void read(const Value* bias_ih, const Value* bias_hh, const Value* parameters, int first_unit) const {
        for (int i = threadIdx.x; i < UNIT_FLOATS * UNITS; i += THREADS) {
            const int row = i / UNITS, unit = first_unit + i % UNITS;
            values[i] = row < SUMS ? bias_of(bias_ih, bias_hh, row, unit) : unit < SIZE ? widened(parameters[(row - SUMS) * SIZE + unit]) : 0.f;
        }
    }

    __device__ __forceinline__ float bias(int sum, int unit) const { return values[sum * UNITS + unit]; }
    __device__ __forceinline__ void load_parameters(Given& given, int unit) const {
#pragma unroll
        for (int i = 0; i < PARAMETERS; ++i) given.parameters[i] = values[(SUMS + i) * UNITS + unit];
    }
};

// The statistics of the rows of a group, [ROWS, STATISTICS] in this step and in the next one; a thread loads some of them a step
// before they are stored to shared memory.
struct RowStatistics {
    static constexpr int COUNT = ROWS * STATISTICS, EACH = (COUNT + THREADS - 1) / THREADS;

    const float* all;  // [tokens, STATISTICS]
    float* rows;       // [2, ROWS, STATISTICS]
    float coming[EACH + 1];

    __device__ __forceinline__ void load(const Ends& ends, int t, int step, int row) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int item = threadIdx.x + i * THREADS, own = item / (STATISTICS ? STATISTICS : 1);
            const bool exists = item < COUNT && t >= 0 && t < ends.of(own < ROWS ? own : 0);
            const size_t token = (size_t)t * step + (size_t)ends.batch_row(own < ROWS ? own : 0) * row;
            coming[i] = exists ? all[token * STATISTICS + item % (STATISTICS ? STATISTICS : 1)] : 0.f;
        }
    }

    __device__ __forceinline__ void store(int parity) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int item = threadIdx.x + i * THREADS;
            if (item < COUNT) rows[parity * COUNT + item] = coming[i];
        }
    }

    __device__ __forceinline__ float of(int row, int i, int parity) const { return rows[parity * COUNT + row * STATISTICS + i]; }
};

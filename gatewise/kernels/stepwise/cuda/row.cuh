// A batch row in one block of THREADS threads, each of which computes UNITS hidden units: the units `threadIdx.x`,
// `threadIdx.x + THREADS`, and so on. The macro CELL_CODE contains the step of the cell and its adjoint for a row, which
// gatewise/derivation/row.py generates from the definition of the cell.
#pragma once
#define WIDTH 1
#include "launch.cuh"
#include "row_cell.cuh"
#include "vectors.cuh"

struct Row {
    int units;
    Real reciprocal;  // 1 / units

    __device__ __forceinline__ int unit(int u) const { return (int)threadIdx.x + u * THREADS; }
    __device__ __forceinline__ bool exists(int u) const { return unit(u) < units; }
    // The unit or, if it does not exist, another one, which can be loaded without a condition.
    __device__ __forceinline__ int near(int u) const { return exists(u) ? unit(u) : 0; }

#if THREADS > 1
    // Replaces numbers by their sums over lanes whose indices differ in the bits of 2 DISTANCE - 1.
    template <int DISTANCE, int COUNT>
    __device__ __forceinline__ static void add_up_lanes(Real (&numbers)[COUNT]) {
#pragma unroll
        for (int distance = DISTANCE; distance > 0; distance /= 2)
#pragma unroll
            for (int i = 0; i < COUNT; i++) numbers[i] += __shfl_xor_sync(0xffffffffu, numbers[i], distance);
    }
#endif

    // Replaces numbers by their sums over all threads of the block, added in the same order in every call. Each PLACE is called
    // once in a launch, so that no thread overwrites sums that another one has not read.
    template <int PLACE, int COUNT>
    __device__ __forceinline__ static void add_up_block(Real (&numbers)[COUNT]) {
#if THREADS > 1
        constexpr int WARPS = THREADS / 32;
        __shared__ Real partial[COUNT][WARPS];
        const int lane = threadIdx.x % 32;
        add_up_lanes<16>(numbers);
        if (WARPS == 1) return;
        if (lane == 0)
#pragma unroll
            for (int i = 0; i < COUNT; i++) partial[i][threadIdx.x / 32] = numbers[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; i++) numbers[i] = partial[i][lane % WARPS];
        add_up_lanes<WARPS / 2>(numbers);
#endif
    }

    // Replaces numbers of units by their sums over all units of the row.
    template <int PLACE, int COUNT>
    __device__ __forceinline__ void add_up(Real (&numbers)[UNITS][COUNT]) const {
        Real sums[COUNT] = {};
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                if (exists(u)) sums[i] += numbers[u][i];
        add_up_block<2 * PLACE>(sums);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) numbers[u][i] = sums[i];
    }

    // Replaces the moments of units by those of the row: first the mean of all means, then the variance about it.
    template <int PLACE, int COUNT>
    __device__ __forceinline__ void merge(Moments (&moments)[UNITS][COUNT]) const {
        Real means[UNITS][COUNT], variances[COUNT] = {};
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) means[u][i] = moments[u][i].mean;
        add_up<PLACE>(means);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const Real distance = moments[u][i].mean - means[u][i] * reciprocal;
                if (exists(u)) variances[i] += moments[u][i].variance + distance * distance;
            }
        add_up_block<2 * PLACE + 1>(variances);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) moments[u][i] = {means[u][i] * reciprocal, variances[i] * reciprocal};
    }
};

// The place of a row in time: its step t, and whether it is active there, at its first or last step in the order of the
// direction, and whether it reads the states before the step, which a reset replaces by their initial values (see resets.cuh).
struct RowStep {
    int t;
    bool active, first, last, reads_state;
};

__device__ __forceinline__ RowStep row_step(
    const i64* lengths, const bool* resets, int direction, int b, int batch, int t, int time) {
    const i64 length = lengths ? lengths[b] : time;
    const bool begins = t == 0, ends = t == length - 1;
    RowStep found = {t, t < length, direction ? ends : begins, direction ? begins : ends, true};
    if (resets && found.active && !(direction && found.first)) found.reads_state = !resets[(i64)(t + direction) * batch + b];
    return found;
}

// Reads the parameters of the cell [PARAMETERS, H] of a direction.
__device__ __forceinline__ void load_parameters(const Value* parameters, int direction, const Row& row, Given (&given)[UNITS]) {
    if (PARAMETERS == 0) return;
    const Value* const own = parameters + (i64)direction * PARAMETERS * row.units;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int i = 0; i < PARAMETERS; i++)
            given[u].parameters[i] = widened(own[i * row.units + row.near(u)]);
}

// Reads the masks of a step [MASKS, T, B, D * H] of a direction.
__device__ __forceinline__ void load_masks(
    const bool* masks, int directions, int direction, i64 t, i64 time, i64 b, i64 batch, const Row& row, Given (&given)[UNITS]) {
    if (MASKS == 0) return;
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int i = 0; i < MASKS; i++) {
            const i64 token = (i * time + t) * batch + b;
            given[u].masks[i] = masks[(token * directions + direction) * row.units + row.near(u)] ? Real(1) : Real(0);
        }
}

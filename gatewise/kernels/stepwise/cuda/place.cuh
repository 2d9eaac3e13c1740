// The elements that a thread computes: WIDTH consecutive elements along the inner axis of a plane.
//
// A plane has one element for each sequence of the batch and each unit. Its inner (contiguous) axis is that of the
// units in row-major layout, and that of the batch in column-major layout (COLUMN); the other axis is the outer one. A
// block has LANES threads along the inner axis and THREADS / LANES along the outer axis.
#pragma once
#include "launch.cuh"
#include "vectors.cuh"

constexpr int THREADS = 128;

struct Place {
    int direction, outer, inner;
};

__device__ __forceinline__ Place place() {
    return {(int)blockIdx.z, (int)(blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES),
            (int)(blockIdx.y * LANES + threadIdx.x % LANES) * WIDTH};
}

// For each element of a thread: whether its sequence has this step, and whether it is the sequence's first or last step
// in the order of the direction.
struct Steps {
    bool active[WIDTH];
    bool first[WIDTH];
    bool last[WIDTH];
};

__device__ __forceinline__ Steps steps(const i64* lengths, Place at, int t, int time) {
    Steps found;
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
#if COLUMN
        const i64 length = lengths ? lengths[at.inner + k] : time;
#else
        const i64 length = lengths ? lengths[at.outer] : time;
#endif
        const bool begins = t == 0, ends = t == length - 1;
        found.active[k] = t < length;
        found.first[k] = at.direction ? ends : begins;
        found.last[k] = at.direction ? begins : ends;
    }
    return found;
}

// The steps that begin an episode inside a sequence, which read the initial values of states in place of all states before
// them: zeros, except for other states than h in row_forward.cu and row_backward.cu. Everything here does nothing without the macro RESETS.
//
// A reset at step t is a border between the steps t - 1 and t. In the reverse direction, the state that would cross it is the
// one that step t hands to step t - 1, so that step t - 1 begins an episode there. Behind the last step of a row is no border.
//
// Zeros are selected in place of a product or a state; nothing is multiplied by zero, because it may be NaN or infinite.
#pragma once
#include "sequence.cuh"

#if RESETS
static_assert(ROWS <= THREADS, "a thread for each row");

// Thread `row` of a block loads the resets of that batch row of the group, each a step before it is used, and hands it to all
// threads in shared memory. This takes one register, and no time in which other blocks wait.
struct Episodes {
    static constexpr unsigned char BEGINS = 1;    // this step begins an episode
    static constexpr unsigned char FOLLOWED = 2;  // the step that was visited before this one does

    const unsigned char* resets;  // [total, B]: the resets of the whole sequence, 0 or 1, in the order of time
    const i64* lengths;           // [B]; read only if RAGGED
    int total, skipped;           // the steps of the sequence, and those of them before the first one here
    bool reverse;
    unsigned char coming;         // the reset of the thread's row at the next step

    template <class Pass>
    __device__ __forceinline__ Episodes(const Pass& p, int skipped, bool reverse)
        : resets(p.resets), lengths(p.lengths), total(p.total), skipped(skipped), reverse(reverse), coming(0) {}

    // The flags of the rows in this step and in the next one: [2, ROWS]. Between the stores to one half and its loads is
    // the barrier of a step, and so between its loads and the next stores.
    __device__ __forceinline__ static unsigned char* flags(int parity) {
        __shared__ unsigned char rows[2 * ROWS];
        return rows + parity * ROWS;
    }

    // Whether step t of a row begins an episode; no step does that the row does not have.
    __device__ __forceinline__ unsigned char begins_at(const Ends& ends, int row, int t) const {
        const int end = ends.of(row);
        if (t < 0 || t >= end) return 0;
        const int n = ends.batch_row(row);
        if (reverse && t + 1 == end) {
            // The row may go on after the steps of this launch; if it does not, it starts here.
            if (end < ends.time || skipped + end >= total) return 0;
#if RAGGED
            if (skipped + end >= lengths[n]) return 0;
#endif
        }
        return resets[(size_t)(skipped + t + reverse) * ends.batch + n];
    }

    // Before a group's first step: the first two steps that are visited.
    __device__ __forceinline__ void start(const Ends& ends, int first, int second, int parity) {
        const int row = threadIdx.x;
        if (row >= ROWS) return;
        flags(parity)[row] = begins_at(ends, row, first);
        coming = begins_at(ends, row, second);
    }

    // At the end of a step: the next step, and t is the one after that.
    __device__ __forceinline__ void advance(const Ends& ends, int t, int parity) {
        const int row = threadIdx.x;
        if (row >= ROWS) return;
        flags(parity ^ 1)[row] = coming | (flags(parity)[row] & BEGINS) << 1;
        coming = begins_at(ends, row, t);
    }

    // Whether the step of a cell begins an episode, and whether the step that was visited before it does.
    __device__ __forceinline__ bool begins(Place at, int parity) const { return flags(parity)[at.exists ? at.row : 0] & BEGINS; }
    __device__ __forceinline__ bool followed(Place at, int parity) const { return flags(parity)[at.exists ? at.row : 0] & FOLLOWED; }
};
#else
struct Episodes {
    template <class Pass>
    __device__ __forceinline__ Episodes(const Pass&, int, bool) {}
    __device__ __forceinline__ void start(const Ends&, int, int, int) {}
    __device__ __forceinline__ void advance(const Ends&, int, int) {}
    __device__ __forceinline__ bool begins(Place, int) const { return false; }
    __device__ __forceinline__ bool followed(Place, int) const { return false; }
};
#endif

// The steps that begin an episode, before which all states are zero. They are read only with the macro RESETS.
//
// A reset at step t is a border between the steps t - 1 and t. In the reverse direction, the state that would cross it is
// the one that step t hands to step t - 1, so that step t - 1 begins the episode there.
#pragma once
#include "place.cuh"

constexpr unsigned ALL_CARRIED = ~0u;

// Return whether a step reads the state before it in the order of the direction, one bit for each element of a thread.
// `resets` is [T, B] in the order of time.
__device__ __forceinline__ unsigned carries(
    const bool* resets, const Steps& found, Place at, int t, int outer, int inner) {
    unsigned bits = ALL_CARRIED;
#pragma unroll
    for (int k = 0; k < (COLUMN ? WIDTH : 1); k++) {
        // Nothing is behind the last step of a sequence, from which the reverse direction starts.
        if (!found.active[k] || (at.direction && found.first[k])) continue;
        const i64 step = t + at.direction;
        const bool reset = COLUMN ? resets[step * inner + at.inner + k] : resets[step * outer + at.outer];
        if (reset) bits = COLUMN ? bits & ~(1u << k) : 0;
    }
    return bits;
}

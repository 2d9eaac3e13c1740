// The masks of a call with dropout or zoneout in the recurrence. Everything here does nothing without masks.
//
// Compile-time constants: DROPS_HIDDEN (dropout of the hidden state that enters the recurrent product), STEP_MASKS (the number of
// masks that change at every step), ZONES_HIDDEN (the first of these is that of zoneout of the hidden state, which the pass
// itself applies; the code of the cell reads the others, or all of them).
//
// With DROPS_HIDDEN, blocks exchange the hidden state as it enters the product, so that each unit is multiplied once, by the
// thread that computes it, and the product over all steps for the gradient of the weights reads what was exchanged.
#pragma once
#include "sequence.cuh"

#ifndef STEP_MASKS
#define STEP_MASKS 0
#endif
#ifndef DROPS_HIDDEN
#define DROPS_HIDDEN 0
#endif
#ifndef ZONES_HIDDEN
#define ZONES_HIDDEN 0
#endif
#define WITH_MASKS (DROPS_HIDDEN || STEP_MASKS)
#define CELL_MASKS (STEP_MASKS - ZONES_HIDDEN)

#if WITH_MASKS
// Whether masks are loaded two steps ahead; where a thread has several cells, steps are long, and registers few.
constexpr bool TWO_AHEAD = CELLS == 1;

// The last arguments of a pass with masks.
struct MaskArguments {
    const Value* hidden;          // [D, B, SIZE]: the hidden state before the first step, without dropout
    const unsigned char* kept;    // [D, B, SIZE]: the units of the hidden state that are not dropped, 0 or 1; read only if DROPS_HIDDEN
    float scale;                  // the factor of these units
    const unsigned char* of_steps[STEP_MASKS ? STEP_MASKS : 1];  // [T, B, D * SIZE], 0 or 1: the masks of steps
};
#endif

// The masks of one step of a cell.
#if STEP_MASKS
struct StepMasks {
    u32 at[STEP_MASKS];

    // 1 where zoneout keeps the hidden state from before the step, and 0 elsewhere. Passes multiply with it instead of branching,
    // as the definition of zoneout does, so that NaN appears in the same places as with all other kernels.
    __device__ __forceinline__ float keeps_hidden() const { return ZONES_HIDDEN && at[0] ? 1.f : 0.f; }
    // A mask that the code of the cell reads.
    __device__ __forceinline__ float of_cell(int index) const { return at[ZONES_HIDDEN + index] ? 1.f : 0.f; }
};
#else
struct StepMasks {
    __device__ __forceinline__ float keeps_hidden() const { return 0.f; }
};
#endif

// The masks of the cells of a thread, for the group of rows that it computes.
#if WITH_MASKS
struct Masks {
    const MaskArguments& given;
    u32 batch, columns, first_column;  // B; D * SIZE; the column of the block's first unit
    u32 kept;                          // a bit for each cell
    StepMasks now[CELLS], coming[CELLS];  // of the next step, and of the one after it if TWO_AHEAD

    template <class Pass>
    __device__ __forceinline__ Masks(const Pass& p, int direction, int first_unit)
        : given(p.masks), batch(p.batch), columns(p.directions * SIZE), first_column(direction * SIZE + first_unit), kept(0) {}

    // Before a group's first step: the first two steps that are visited.
    __device__ __forceinline__ void start(const Ends& ends, int direction, int first_unit, int first, int second) {
        kept = 0;
#pragma unroll
        for (int cell = 0; cell < CELLS; ++cell) {
            const Place at = place_of(cell);
            const int row = at.exists ? at.row : 0, unit = first_unit + at.unit;
            if (DROPS_HIDDEN && at.exists && unit < SIZE && ends.first_row + row < ends.batch &&
                given.kept[((size_t)direction * batch + ends.batch_row(row)) * SIZE + unit])
                kept |= 1u << cell;
            now[cell] = load(ends, first_unit, cell, first);
            if (TWO_AHEAD) coming[cell] = load(ends, first_unit, cell, second);
        }
    }

    // The index of the mask of the block's first unit. Only the product with the step is computed in 64 bits.
    __device__ __forceinline__ u64 place_at(int t, int place) const {
        return (u64)(u32)t * (batch * columns) + (place * columns + first_column);
    }

    // The masks of a cell at step t; zeros where the row has no such step, or the layer no such unit.
    __device__ __forceinline__ StepMasks load(const Ends& ends, int first_unit, int cell, int t) const {
        StepMasks found = {};
#if STEP_MASKS
        const Place at = place_of(cell);
        const int row = at.exists ? at.row : 0;
        if (!at.exists || first_unit + at.unit >= SIZE || t < 0 || t >= ends.of(row)) return found;
        const u64 place = place_at(t, ends.batch_row(row)) + at.unit;
#pragma unroll
        for (int i = 0; i < STEP_MASKS; ++i) found.at[i] = given.of_steps[i][place];
#endif
        return found;
    }

    // At the end of a step: the masks of step `next`, or of the step after it, t, are loaded, and those of step `later` are
    // prefetched.
    __device__ __forceinline__ void advance(const Ends& ends, int first_unit, int cell, int next, int t, int later) {
#if STEP_MASKS
        now[cell] = TWO_AHEAD ? coming[cell] : load(ends, first_unit, cell, next);
        if (TWO_AHEAD) coming[cell] = load(ends, first_unit, cell, t);
        const Place at = place_of(cell);
        if (!at.exists || at.unit || later < 0 || later >= ends.of(at.row)) return;
        const u64 place = place_at(later, ends.batch_row(at.row));
#pragma unroll
        for (int i = 0; i < STEP_MASKS; ++i) prefetch(given.of_steps[i] + place);
#endif
    }

    // The factor of a unit of the hidden state in the recurrent product, and of its gradient.
    __device__ __forceinline__ float factor(int cell) const { return !DROPS_HIDDEN ? 1.f : kept >> cell & 1 ? given.scale : 0.f; }
    __device__ __forceinline__ const StepMasks& of(int cell) const { return now[cell]; }
};
#else
struct Masks {
    template <class Pass>
    __device__ __forceinline__ Masks(const Pass&, int, int) {}
    __device__ __forceinline__ void start(const Ends&, int, int, int, int) {}
    __device__ __forceinline__ void advance(const Ends&, int, int, int, int, int) {}
    __device__ __forceinline__ float factor(int) const { return 1.f; }
    __device__ __forceinline__ StepMasks of(int) const { return {}; }
};
#endif

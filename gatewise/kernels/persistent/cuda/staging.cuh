// The transposition of 16-bit weights for the backward pass: through shared memory, STAGED spans of a warp at a time. The memory
// is that of the partial sums, which is unused until the weights are loaded.
#pragma once
#include "sequence.cuh"

constexpr int COLUMNS = TILES * 16;                  // the hidden units of all tiles
constexpr int ROW_PITCH = COLUMNS * 2 + 16;          // in bytes; eight neighbouring rows have no bank conflicts
constexpr int SPAN_PITCH = SPAN * ROW_PITCH;
static_assert(COLUMNS == SPLIT * UNITS, "whole tiles");

constexpr int LOADS = COLUMNS * 2 / ROW_ALIGNMENT;  // loads for a row
constexpr int LANES = LOADS % 32 == 0 ? 32 : LOADS % 16 == 0 ? 16 : LOADS % 8 == 0 ? 8 : 4;

// A warp's part of the memory. Rows of a span that are transposed together are neighbours in shared memory.
struct Staging {
    char* memory;         // the memory, of STAGED spans
    const Value* matrix;  // the first weight in the columns of the block's tiles
    int first;            // the first gate sum of the block's depth; with INTERLEAVED the first row of its depth
    bool between;         // whether the weights are the input weights of the second layer

    // The row of a span that is stored at a place.
    __device__ __forceinline__ static constexpr int row_at(int place) { return (place >> 1 & 3) * 8 + (place >> 3) * 2 + (place & 1); }

    // Begins to load a span; LANES neighbouring lanes load a row.
    __device__ __forceinline__ void request(int span, int first_unit) const {
        constexpr int VALUES = ROW_ALIGNMENT / 2, AT_ONCE = 32 / LANES;
        const int lane = threadIdx.x & 31, column = lane % LANES * VALUES, place = lane / LANES;
        // Rows at places that are AT_ONCE apart have a constant distance, too.
        const int depth = (int)(threadIdx.x >> 5) * SPANS * SPAN + span * SPAN + row_at(place);
        char* const to = memory + span % STAGED * SPAN_PITCH + place * ROW_PITCH + column * 2;
#if INTERLEAVED
        // Four neighbouring rows are the gate sums of a unit.
#pragma unroll
        for (int i = 0; i < SPAN / AT_ONCE; ++i) {
            const int at = depth + row_at(i * AT_ONCE), unit = (first + at) / 4, gate = gate_of((first + at) % 4, between);
            const Value* const from = matrix + ((long long)gate * SIZE + unit) * SIZE + column;
#pragma unroll
            for (int next = 0; next < COLUMNS; next += LANES * VALUES) {
                if (next + LANES * VALUES > COLUMNS && next + column >= COLUMNS) continue;
                const bool exists = (WARPS * SPANS * SPAN == WIDTH || at < WIDTH) && (HIDDEN == SIZE || unit < SIZE) && (SUMS_ARE_GATES || gate >= 0) && is_unit(first_unit + next + column);
                copy(to + i * AT_ONCE * ROW_PITCH + next * 2, from + next, exists);
            }
        }
#else
        constexpr bool ONE_SUM = (SUMS_ARE_GATES && HIDDEN == SIZE) || SPLIT == 4;  // the depth of the block is that of one sum, or can be treated so
        const Value* const origin = matrix + ((long long)gate_of(first, between) * SIZE + depth) * SIZE + column;
#pragma unroll
        for (int i = 0; i < SPAN / AT_ONCE; ++i) {
            const int further = row_at(i * AT_ONCE), sum = ONE_SUM ? 0 : (depth + further) / HIDDEN;
            const int gate = gate_of(first + sum, between);
            const int left = (SUMS_ARE_GATES && HIDDEN == SIZE ? WIDTH : SIZE) + sum * HIDDEN - depth;  // the remaining rows of the gate
            const int skipped = (SUMS_ARE_GATES ? sum : gate - gate_of(first, between)) * SIZE - sum * HIDDEN;
            const Value* const from = origin + (further + skipped) * SIZE;
#pragma unroll
            for (int next = 0; next < COLUMNS; next += LANES * VALUES) {
                if (next + LANES * VALUES > COLUMNS && next + column >= COLUMNS) continue;
                const bool exists = ((SUMS_ARE_GATES && HIDDEN == SIZE && WARPS * SPANS * SPAN == WIDTH) || further < left) &&
                                    (ONE_SUM || depth + further < WIDTH) && (SUMS_ARE_GATES || gate >= 0) && is_unit(first_unit + next + column);
                copy(to + i * AT_ONCE * ROW_PITCH + next * 2, from + next, exists);
            }
        }
#endif
    }

    __device__ __forceinline__ static void copy(char* to, const Value* from, bool exists) {
        if constexpr (ROW_ALIGNMENT == 2) {
            *(Value*)to = exists ? *from : (Value)0;
        } else {
            begin_copy<ROW_ALIGNMENT>(to, from, exists);
        }
    }

    // Waits for a span, which must be called for each span in turn, and begins to load a later one.
    __device__ __forceinline__ void arrive(int span, int first_unit) const {
#pragma unroll
        for (int next = span ? span + STAGED - 1 : 0; next < span + STAGED; ++next) {
            __syncwarp();  // all lanes have read the span that was stored there before
            if (next < SPANS) request(next, first_unit);
            end_group_of_copies();
        }
        wait_for_copies<STAGED - 1>();
        __syncwarp();
    }

    // Lane 8 i + q passes the address of row q of matrix i: i & 1 is the half of the tile, i / 2 that of its depth.
    __device__ __forceinline__ Pair pair_at(int tile, int span) const {
        const int lane = threadIdx.x & 31;
        const char* const row = memory + span % STAGED * SPAN_PITCH + ((lane >> 4) * 8 + (lane & 7)) * ROW_PITCH + tile * 32 + (lane >> 3 & 1) * 16;
        return {{load_transposed_matrices(row), load_transposed_matrices(row + 16 * ROW_PITCH)}};
    }
};

// The factors of the recurrent product of a step, as both ways to compute it read them: rows of weights and batch rows.
#pragma once
#include "exchange.cuh"
#include "matrix.cuh"
#include "memory.cuh"
#include "shuffles.cuh"

constexpr int THREADS = WARPS * 32;

// The source of a lane's batch row in this step: the exchange, which is polled, or memory that is loaded once, because it was
// complete before the launch or because results from it are not used. Values that are used are results of `canonical`, or
// could be.
struct Row {
    const Value* data;  // the address of the lane's first value
    bool polled, counted;  // `counted`: whether results from it are used
};

// A lane's weights of one tile in one span, as loaded: alternately for the row of weights lane / 4 and the eighth row after
// it, along the depth.
struct Pair {
    uint4 half[2];
};

// The alignment of rows of weights, in bytes; that of the first row is 16.
constexpr int ROW_BYTES = SIZE * (int)sizeof(Value);
constexpr int ROW_ALIGNMENT = ROW_BYTES % 16 == 0 ? 16 : ROW_BYTES % 8 == 0 ? 8 : ROW_BYTES % 4 == 0 ? 4 : 2;

// Loads 16 bytes of a row of weights from value k on; zeros after its end, and if not `exists`.
__device__ __forceinline__ uint4 load_weight_words(const Value* row, int k, bool exists) {
    if constexpr (ROW_ALIGNMENT == 16) return load_within(row, k, SIZE, exists);
    u32 words[4] = {0, 0, 0, 0};
    if (!exists) return make_uint4(0, 0, 0, 0);
    constexpr int VALUES = ROW_ALIGNMENT / (int)sizeof(Value);  // values that one instruction loads
#pragma unroll
    for (int i = 0; i < 16 / ROW_ALIGNMENT; ++i) {
        const Value* const from = row + k + i * VALUES;
        if (k + i * VALUES >= SIZE) continue;
        if constexpr (ROW_ALIGNMENT == 8) {
            const uint2 half = *(const uint2*)from;
            words[2 * i] = half.x, words[2 * i + 1] = half.y;
        } else if constexpr (ROW_ALIGNMENT == 4) {
            words[i] = *(const u32*)from;
        } else {
            words[i / 2] |= (u32)*from << 16 * (i % 2);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

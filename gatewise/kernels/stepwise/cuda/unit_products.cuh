// The products of one unit's rows of both weight matrices with the inputs and the hidden states of up to 8 sequences, in the
// format of sums: each thread multiplies pieces of all rows by the same pieces of all vectors.
#pragma once
#include "shuffles.cuh"

static_assert(UNITS == 1);

// What one instruction loads of a row of the input weights or of the recurrent weights.
template <bool RECURRENT>
struct alignas((RECURRENT ? WIDTH : INPUT_WIDTH) * sizeof(Value)) Piece {
    static constexpr int SIZE = RECURRENT ? WIDTH : INPUT_WIDTH;
    Value at[SIZE];
};

// The pieces of the rows of all sums, for one place in the rows.
template <bool RECURRENT>
struct Pieces {
    Piece<RECURRENT> of_sum[SUMS];
};

// Loads the pieces of the unit's rows of a matrix [GATES * H, size] that begin at column k.
template <bool RECURRENT>
__device__ __forceinline__ void load_pieces(Pieces<RECURRENT>& pieces, const Value* matrix, int size, int k, int units) {
    if (k >= size) return;
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++)
        if (gate_of<RECURRENT>(sum) >= 0)
            pieces.of_sum[sum] = *(const Piece<RECURRENT>*)(matrix + ((i64)gate_of<RECURRENT>(sum) * units + blockIdx.x) * size + k);
}

// Adds a thread's part of the products of the unit's rows with vectors [B, size]. The first pieces have been loaded before.
// Sequences after the last one take its values.
template <bool RECURRENT>
__device__ __forceinline__ void add_products(
    Pieces<RECURRENT>& pieces, const Value* matrix, const Value* vectors, int size, const Single& p, Real (&sums)[SUMS][ROWS]) {
    constexpr int SIZE = Piece<RECURRENT>::SIZE;
#pragma unroll 1
    for (int k = threadIdx.x * SIZE; k < size; k += THREADS * SIZE) {
        Pieces<RECURRENT> later;
        load_pieces<RECURRENT>(later, matrix, size, k + THREADS * SIZE, p.units);
#pragma unroll
        for (int b = 0; b < ROWS; b++) {
            const auto own = *(const Piece<RECURRENT>*)(vectors + (i64)(b < p.batch ? b : p.batch - 1) * size + k);
#pragma unroll
            for (int sum = 0; sum < SUMS; sum++)
                if (gate_of<RECURRENT>(sum) >= 0)
#pragma unroll
                    for (int i = 0; i < SIZE; i++) sums[sum][b] += widened(pieces.of_sum[sum].at[i]) * widened(own.at[i]);
        }
        pieces = later;
    }
}

// Adds up the numbers of each sequence over the lanes of a warp. A lane receives the sum of sequence lane / (LANES / ROWS): at
// each distance, the lanes of each half give away the numbers of the other half's sequences.
__device__ __forceinline__ Real added_up(Real (&numbers)[ROWS]) {
    int distance = LANES / 2;
#pragma unroll
    for (int rows = ROWS / 2; rows > 0; rows /= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int b = 0; b < rows; b++) {
            const Real given = upper ? numbers[b] : numbers[b + rows];
            numbers[b] = (upper ? numbers[b + rows] : numbers[b]) + __shfl_xor_sync(EVERY_LANE, given, distance);
        }
        distance /= 2;
    }
#pragma unroll
    for (; distance > 0; distance /= 2) numbers[0] += __shfl_xor_sync(EVERY_LANE, numbers[0], distance);
    return numbers[0];
}

// The first pieces of a thread, which are loaded before it waits for anything.
struct First {
    Pieces<false> of_input;
    Pieces<true> of_hidden;
};

__device__ __forceinline__ void load_first(First& first, const Single& p) {
    load_pieces<false>(first.of_input, p.input_weights, p.inputs, threadIdx.x * INPUT_WIDTH, p.units);
    load_pieces<true>(first.of_hidden, p.recurrent_weights, p.units, threadIdx.x * WIDTH, p.units);
}

// Multiplies, and adds up the parts of each warp, of which `products` then has a row for each sum of a sequence.
__device__ __forceinline__ void multiply_rows(First& first, const Value* hidden, const Single& p, Real* products) {
    Real sums[SUMS][ROWS] = {};
    add_products<false>(first.of_input, p.input_weights, p.x, p.inputs, p, sums);
    add_products<true>(first.of_hidden, p.recurrent_weights, hidden, p.units, p, sums);
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++) {
        const Real found = added_up(sums[sum]);
        const int lane = threadIdx.x % LANES, each = LANES / ROWS;
        if (lane % each == 0) products[(threadIdx.x / LANES * SUMS + sum) * ROWS + lane / each] = found;
    }
}

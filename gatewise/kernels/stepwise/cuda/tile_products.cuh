// The products of the rows of a few units of both weight matrices with the inputs and the hidden states of up to 64 sequences,
// on tensor cores: for factors of 16 bits, in rows of a multiple of 16 bytes.
//
// A warp multiplies 32 values of all rows at once: the four lanes that share a row load 16 bytes each. These are the values of
// a lane in two products of depth 16. Which value of a row has which place in the depth of a product makes no difference, as
// long as it is the same one for both factors.
#pragma once
#include "matrix.cuh"

constexpr int TILES = ROWS / 8;                             // of eight sequences
constexpr int PARTS = (UNITS * SUMS + 15) / 16;             // of 16 rows; row unit * SUMS + sum is that of a sum of a unit
constexpr int OF_LANE = 16 / sizeof(Value), DEPTH = 4 * OF_LANE;
static_assert(sizeof(Value) == 2 && WIDTH == OF_LANE && INPUT_WIDTH == OF_LANE);
static_assert(UNITS * ROWS <= THREADS, "a thread computes the step of a unit of a sequence");

// A lane's words of the rows, for one place in the rows.
struct Rows {
    uint4 of_part[PARTS][2];
};

// Loads what a lane multiplies from column k on, of a matrix [GATES * H, size].
template <bool RECURRENT>
__device__ __forceinline__ void load_rows(Rows& rows, const Value* matrix, int size, int k, int units) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int i = 0; i < 2 * PARTS; i++) {
        const int row = 8 * i + lane / 4, unit = blockIdx.x * UNITS + row / SUMS, gate = gate_of<RECURRENT>(row % SUMS);
        const bool exists = row < UNITS * SUMS && unit < units && gate >= 0;
        const Value* place = matrix + (exists ? ((i64)gate * units + unit) * size : 0);
        rows.of_part[i / 2][i % 2] = load_within(place, k + lane % 4 * OF_LANE, size, exists);
    }
}

// Adds a warp's part of the products of the rows with vectors [B, size]. The first words have been loaded before. Sequences
// after the last one take its values.
template <bool RECURRENT>
__device__ __forceinline__ void add_products(
    Rows& rows, const Value* matrix, const Value* vectors, int size, const Single& p, float (&sums)[PARTS][TILES][4]) {
    const int lane = threadIdx.x % LANES;
#pragma unroll 2
    for (int k = threadIdx.x / LANES * DEPTH; k < size; k += WARPS * DEPTH) {
        Rows later;
        load_rows<RECURRENT>(later, matrix, size, k + WARPS * DEPTH, p.units);
        uint4 own[TILES];
        const int column = k + lane % 4 * OF_LANE;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int sequence = min(8 * tile + lane / 4, p.batch - 1);
            own[tile] = make_uint4(0, 0, 0, 0);
            if (column < size) own[tile] = *(const uint4*)(vectors + (i64)sequence * size + column);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint4 low = rows.of_part[part][0], high = rows.of_part[part][1];
            const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                multiply<Number>(sums[part][tile], first, own[tile].x, own[tile].y);
                multiply<Number>(sums[part][tile], second, own[tile].z, own[tile].w);
            }
        }
        rows = later;
    }
}

// The first words of a lane, which are loaded before it waits for anything.
struct First {
    Rows of_input, of_hidden;
};

__device__ __forceinline__ void load_first(First& first, const Single& p) {
    const int k = threadIdx.x / LANES * DEPTH;
    load_rows<false>(first.of_input, p.input_weights, p.inputs, k, p.units);
    load_rows<true>(first.of_hidden, p.recurrent_weights, p.units, k, p.units);
}

// Multiplies; `products` then has the parts of each warp, with a row for each sum of a unit and a column for each sequence.
__device__ __forceinline__ void multiply_rows(First& first, const Value* hidden, const Single& p, Real* products) {
    float sums[PARTS][TILES][4] = {};
    add_products<false>(first.of_input, p.input_weights, p.x, p.inputs, p, sums);
    add_products<true>(first.of_hidden, p.recurrent_weights, hidden, p.units, p, sums);
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = 16 * part + i / 2 * 8 + lane / 4, sequence = 8 * tile + lane % 4 * 2 + i % 2;
                if (row < UNITS * SUMS) products[(threadIdx.x / LANES * UNITS * SUMS + row) * ROWS + sequence] = sums[part][tile][i];
            }
}

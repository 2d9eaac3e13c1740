// Rounds the gradients of gate sums to float16 in place, each row multiplied by the power of two of its largest value (see
// scales.cuh), and finds the exponents that the other factors of the products over all steps are scaled by:
//
//     of the largest terms of a sum over tokens, the largest sum of the exponents of a token's largest gradient and of the
//     largest value that is multiplied with it (see gathered.cuh), of tokens for which neither is zero;
//     of a matrix, the bits of its largest magnitude.
//
// NaN and infinities stay what they are, and count for no magnitude.
//
// The float16 numbers of a row take the first half of its memory. A block has a row in registers when it writes it back.
// Compile-time constants: WIDTH, the values of a row, a multiple of 4; THREADS of a block, at least 64; BYTES, the size of a word
// of the other values, 4, 8 or 16; HALVES, which is 1; RESETS; DTYPE (see numbers.cuh).
#include "word.cuh"
#include "gathered.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int LOADS = WIDTH / 4;                           // of a row, of 4 values each
constexpr int OWN_LOADS = (LOADS + THREADS - 1) / THREADS;  // of a thread
constexpr int REGISTERS = 32 + 4 * OWN_LOADS;              // of a thread, with which the compiler needs no stack
constexpr int FITTING = 65536 / THREADS / REGISTERS;
constexpr int BLOCKS = FITTING < 6 ? FITTING : 6;          // of a multiprocessor at least: their rows are under way at the same time
constexpr int SOURCES = 2;                                 // values that the gradients of a token are multiplied with

struct Rows {
    float* values;   // [tokens, WIDTH]
    int* exponents;  // [tokens]: of the largest value of each row
    Source sources[SOURCES];
    int* largest_terms[SOURCES];  // negative before the launch, and afterwards if all terms are zero
};

struct Matrix {
    const float* values;
    long long count;
    int* largest;  // the bits of the largest magnitude; negative before the launch, and afterwards if it is zero
};

struct HalfRows {
    Rows rows[2];  // for each direction
    Matrix matrices[2];
    Tokens tokens;
    int directions;
};

// Magnitudes are compared as twice their bits, without the sign, plus a constant with which infinities and NaN overflow, so that
// they are less than any finite number. This takes an instruction for a number, where `Float32::finite_magnitude` takes three.
constexpr u32 ZERO = 0u - 2 * Float32::INFINITE;  // that of the number 0

__device__ __forceinline__ u32 rank(float value) { return 2 * Float32::to_bits(value) + ZERO; }
__device__ __forceinline__ u32 rank(Word word) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) most = max(most, rank(word.at[i]));
    return most;
}

// The bits of the largest magnitude.
__device__ __forceinline__ u32 bits_of(u32 rank) { return (max(rank, ZERO) - ZERO) / 2; }

// The largest rank of a warp, written to its place among those of all warps; and the bits of the largest magnitude, behind a
// barrier.
__device__ __forceinline__ void hand_over(u32 own, u32* of_warps) {
    own = __reduce_max_sync(0xffffffffu, own);
    if ((threadIdx.x & 31) == 0) of_warps[threadIdx.x >> 5] = own;
}
__device__ __forceinline__ u32 largest_of(const u32* of_warps) {
    u32 most = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) most = max(most, of_warps[warp]);
    return bits_of(most);
}

__device__ __forceinline__ void halve_rows(const Rows& p, const Tokens& tokens, u32* shared) {
    const int warp = threadIdx.x >> 5;
    const bool adds_up = (threadIdx.x & 31) == 0 && warp < SOURCES;  // a thread for each source
    int largest_term = -1, turn = 0;
    for (int number = blockIdx.x; number < tokens.count(); number += gridDim.x, turn ^= 1) {
        const Token at(tokens, number);
        float4* const row = (float4*)(p.values + (size_t)at.index * WIDTH);
        // Two places in turn, so that a warp may begin with the next row while others still read the maxima of this one.
        u32* const found = shared + turn * (1 + SOURCES) * WARPS;
        // All these loads are on their way before the first value arrives.
        float4 values[OWN_LOADS];
#pragma unroll
        for (int i = 0; i < OWN_LOADS; ++i) {
            const int load = i * THREADS + threadIdx.x;
            values[i] = load < LOADS ? row[load] : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        const Gathered read[SOURCES] = {{p.sources[0], tokens, at}, {p.sources[1], tokens, at}};
        Word first[SOURCES];
#pragma unroll
        for (int i = 0; i < SOURCES; ++i) first[i] = (int)threadIdx.x < read[i].filled ? read[i].from[threadIdx.x] : Word{};
#pragma unroll
        for (int i = 0; i < SOURCES; ++i) {
            u32 most = rank(first[i]);
#pragma unroll 1  // more take registers, and are needed by wide rows only
            for (int column = threadIdx.x + THREADS; column < read[i].filled; column += THREADS) most = max(most, rank(read[i].from[column]));
            hand_over(most, found + (1 + i) * WARPS);
        }
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < OWN_LOADS; ++i) {
            const u32 low = max(rank(values[i].x), rank(values[i].y));
            const u32 high = max(rank(values[i].z), rank(values[i].w));
            largest = max(largest, max(low, high));
        }
        hand_over(largest, found);
        __syncthreads();  // after this, every value of the row is in a register
        const int exponent = exponent_of_largest(largest_of(found));
        const Scale scale = Scale::of(TOP - exponent);
#pragma unroll
        for (int i = 0; i < OWN_LOADS; ++i) {
            const int load = i * THREADS + threadIdx.x;
            const u32 low = Float16::pair(scale(values[i].x), scale(values[i].y));
            const u32 high = Float16::pair(scale(values[i].z), scale(values[i].w));
            if (load < LOADS) ((uint2*)row)[load] = make_uint2(low, high);
        }
        if (threadIdx.x == 0) p.exponents[at.index] = exponent;
        if (adds_up) largest_term = max(largest_term, exponent + exponent_of_largest(largest_of(found + (1 + warp) * WARPS)));
    }
    if (adds_up && largest_term >= 0) atomicMax(p.largest_terms[warp], largest_term);
}

__device__ __forceinline__ void find_largest(const Matrix& p, u32* shared) {
    u32 most = 0;
#pragma unroll 8
    for (long long place = blockIdx.x * THREADS + threadIdx.x; place < p.count; place += gridDim.x * THREADS) most = max(most, rank(p.values[place]));
    hand_over(most, shared);
    __syncthreads();
    most = largest_of(shared);
    if (threadIdx.x == 0 && most) atomicMax(p.largest, (int)most);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) recurrent_half_rows(const HalfRows p) {
    __shared__ u32 maxima[2 * (1 + SOURCES) * WARPS];
    const int slot = blockIdx.y;
    if (slot < p.directions) halve_rows(p.rows[slot], p.tokens, maxima);
    else find_largest(p.matrices[slot - p.directions], maxima);
}

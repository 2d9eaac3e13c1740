// Rounds the gradients of gate sums to float16 in place, each row multiplied by the power of two of its largest value (see
// scales.cuh), and finds the largest magnitudes of the other factors of the products over all steps. NaN and infinities stay
// what they are, and count for no magnitude.
//
// The float16 numbers of a row take the first half of its memory. A block has a row in registers when it writes it back.
// Compile-time constants: WIDTH, the values of a row, a multiple of 4; THREADS of a block; DTYPE (see numbers.cuh).
#include "scales.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int LOADS = WIDTH / 4;                           // of a row, of 4 values each
constexpr int OWN_LOADS = (LOADS + THREADS - 1) / THREADS;  // of a thread

// Values whose largest magnitude is wanted: [time, batch, columns].
struct Factor {
    const float* values;
    long long step, row;  // the distance from one step, and from one batch row, to the next
    int* largest;
    int columns, time, batch;
    int ragged;  // whether only the steps of each sequence count
    int blocks;  // that read them
};

struct HalfRows {
    float* rows[2];     // [tokens, WIDTH], for each direction
    int* exponents[2];  // [tokens]: the biased exponents of the largest values
    int* largest[2];    // the bits of the largest magnitude; negative before the launch, as in `Factor`
    Factor of[7];
    const long long* lengths;  // [B], or null
    int tokens, directions;
    int blocks;  // of each direction; those of the factors follow
};

__device__ __forceinline__ u32 magnitude(float value) { return Float32::finite_magnitude(Float32::to_bits(value)); }

// Two values in turn, so that a warp may begin with the next one while others still read this one.
__device__ __forceinline__ u32 largest_of_block(u32 own, int turn) {
    __shared__ u32 found[2 * WARPS];
    own = __reduce_max_sync(0xffffffffu, own);
    if ((threadIdx.x & 31) == 0) found[turn * WARPS + (threadIdx.x >> 5)] = own;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) own = max(own, found[turn * WARPS + warp]);
    return own;
}

__device__ __forceinline__ u32 halved_rows(const HalfRows& p, int direction, int block) {
    u32 most = 0;
    int turn = 0;
    for (int row = block; row < p.tokens; row += p.blocks, turn ^= 1) {
        float4* const own = (float4*)(p.rows[direction] + (size_t)row * WIDTH);
        float4 values[OWN_LOADS];
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < OWN_LOADS; ++i) {
            const int load = i * THREADS + threadIdx.x;
            values[i] = load < LOADS ? own[load] : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int i = 0; i < OWN_LOADS; ++i) {
            const u32 low = max(magnitude(values[i].x), magnitude(values[i].y));
            const u32 high = max(magnitude(values[i].z), magnitude(values[i].w));
            largest = max(largest, max(low, high));
        }
        largest = largest_of_block(largest, turn);  // after this, every value of the row is in a register
        const int exponent = exponent_of_largest(largest);
        const Scale scale = Scale::of(TOP - exponent);
#pragma unroll
        for (int i = 0; i < OWN_LOADS; ++i) {
            const int load = i * THREADS + threadIdx.x;
            const u32 low = Float16::pair(scale(values[i].x), scale(values[i].y));
            const u32 high = Float16::pair(scale(values[i].z), scale(values[i].w));
            if (load < LOADS) ((uint2*)own)[load] = make_uint2(low, high);
        }
        if (threadIdx.x == 0) p.exponents[direction][row] = exponent;
        most = max(most, largest);
    }
    return most;
}

__device__ __forceinline__ u32 largest_of_factor(const Factor& own, const long long* lengths, int block) {
    const int lane = threadIdx.x & 31;
    u32 most = 0;
    for (int token = block * WARPS + (threadIdx.x >> 5); token < own.time * own.batch; token += own.blocks * WARPS) {
        const int t = token / own.batch, n = token % own.batch;
        if (own.ragged && t >= lengths[n]) continue;
        const float* const row = own.values + t * own.step + n * own.row;
#pragma unroll 8
        for (int column = lane; column < own.columns; column += 32) most = max(most, magnitude(row[column]));
    }
    return largest_of_block(most, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) recurrent_half_rows(const HalfRows p) {
    const int direction = blockIdx.x / p.blocks;
    const bool rows = direction < p.directions;
    int block = blockIdx.x - (rows ? direction : p.directions) * p.blocks, factor = 0;
    if (!rows)
        while (block >= p.of[factor].blocks) block -= p.of[factor++].blocks;
    const u32 most = rows ? halved_rows(p, direction, block) : largest_of_factor(p.of[factor], p.lengths, block);
    if (threadIdx.x == 0 && most) atomicMax(rows ? p.largest[direction] : p.of[factor].largest, (int)most);
}

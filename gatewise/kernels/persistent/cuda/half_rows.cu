// Rounds the gradients of gate sums to float16 in place, each row multiplied by the power of two of its largest value (see
// scales.cuh). NaN and infinities stay what they are, and count for no magnitude.
//
// The float16 numbers of a row take the first half of its memory. A block has a row in registers when it writes it back.
// Compile-time constants: WIDTH, the values of a row, a multiple of 4; THREADS of a block; DTYPE (see numbers.cuh).
#include "scales.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int LOADS = WIDTH / 4;                           // of a row, of 4 values each
constexpr int OWN_LOADS = (LOADS + THREADS - 1) / THREADS;  // of a thread
constexpr int REGISTERS = 32 + 4 * OWN_LOADS;              // of a thread, with which the compiler needs no stack
constexpr int FITTING = 65536 / THREADS / REGISTERS;
constexpr int BLOCKS = FITTING < 6 ? FITTING : 6;          // of a multiprocessor at least: their rows are under way at the same time

struct Rows {
    float* values;   // [tokens, WIDTH]
    int* exponents;  // [tokens]: of the largest value of each row
};

struct HalfRows {
    Rows of[2];  // each direction
    int tokens;
};

// Magnitudes are compared as twice their bits, without the sign, plus a constant with which infinities and NaN overflow, so that
// they are less than any finite number. This takes an instruction for a number, where `Float32::finite_magnitude` takes three.
constexpr u32 ZERO = 0u - 2 * Float32::INFINITE;  // that of the number 0

__device__ __forceinline__ u32 rank(float value) { return 2 * Float32::to_bits(value) + ZERO; }

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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) recurrent_half_rows(const HalfRows p) {
    __shared__ u32 maxima[2 * WARPS];
    float* const rows = blockIdx.y ? p.of[1].values : p.of[0].values;
    int* const exponents = blockIdx.y ? p.of[1].exponents : p.of[0].exponents;
    int turn = 0;
    for (int token = blockIdx.x; token < p.tokens; token += gridDim.x, turn ^= 1) {
        float4* const row = (float4*)(rows + (size_t)token * WIDTH);
        // Two places in turn, so that a warp may begin with the next row while others still read the maxima of this one.
        u32* const found = maxima + turn * WARPS;
        // All these loads are on their way before the first value arrives.
        float4 values[OWN_LOADS];
#pragma unroll
        for (int i = 0; i < OWN_LOADS; ++i) {
            const int load = i * THREADS + threadIdx.x;
            values[i] = load < LOADS ? row[load] : make_float4(0.f, 0.f, 0.f, 0.f);
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
        if (threadIdx.x == 0) exponents[token] = exponent;
    }
}

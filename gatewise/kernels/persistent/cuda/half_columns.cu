// Finds the exponents by which the columns of factors are scaled (see scales.cuh): for each column of values that a sum over
// tokens multiplies with gradients, the largest sum of the exponents of a value and of the largest gradient of the value's
// token, of tokens for which neither is zero; for each column of a matrix, the exponent of the largest value.
//
// NaN and infinities count for nothing. A largest sum does not depend on the order in which blocks arrive.
// Compile-time constants: BYTES, the size of a word of the values, 4, 8 or 16; HALVES, which is 1; THREADS of a block, at least
// 128; AT_ONCE, the tokens that a warp reads at once; RESETS; DTYPE (see numbers.cuh).
#include "word.cuh"
#include "gathered.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int NUMBERS = BYTES / 4;   // of a word
constexpr int TILE = 32 * NUMBERS;   // the columns of a block: one word for each lane; its warps take different tokens

struct Columns {
    Source source;
    Tokens tokens;         // the rows of a matrix are as many steps
    const int* exponents;  // [tokens]: of the largest gradients; null for a matrix
    int* largest;          // of each column; negative before the launch, and afterwards if all are zero
};

struct HalfColumns {
    Columns of[6];
};

extern "C" __global__ void __launch_bounds__(THREADS) recurrent_half_columns(const HalfColumns p) {
    __shared__ int of_warps[WARPS * TILE];
    const Columns& own = p.of[blockIdx.z];
    const Source source = own.source;
    const Tokens tokens = own.tokens;
    const int* const exponents = own.exponents;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int first = blockIdx.y * TILE, column = blockIdx.y * 32 + lane;  // in numbers, and in words
    if (first >= source.columns * NUMBERS) return;
    int most[NUMBERS];
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) most[i] = -1;
    const int count = tokens.count(), batch = tokens.batch;
    for (int first_token = (blockIdx.x * WARPS + warp) * AT_ONCE; first_token < count; first_token += gridDim.x * WARPS * AT_ONCE) {
        // All these loads are on their way before the first value arrives.
        Word words[AT_ONCE];
        int of_tokens[AT_ONCE];
        int t = first_token / batch, n = first_token % batch;
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (first_token + k >= count) t = n = 0;  // a token that may be read again
            const Token at(tokens, t, n);
            const Gathered read(source, tokens, at);
            words[k] = column < read.filled ? read.from[column] : Word{};
            of_tokens[k] = exponents ? exponents[at.index] : 0;
            if (++n == batch) n = 0, ++t;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
#pragma unroll
            for (int i = 0; i < NUMBERS; ++i) {
                const int magnitude = Float32::finite_magnitude(Float32::to_bits(words[k].at[i]));
                most[i] = max(most[i], exponents ? of_tokens[k] + exponent_of_largest(magnitude) : magnitude);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) of_warps[warp * TILE + lane * NUMBERS + i] = exponents ? most[i] : exponent_of_largest(most[i]);
    __syncthreads();
    const int place = threadIdx.x;
    if (place >= TILE || first + place >= source.columns * NUMBERS) return;
    int largest = -1;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) largest = max(largest, of_warps[other * TILE + place]);
    if (largest >= 0) atomicMax(own.largest + first + place, largest);
}

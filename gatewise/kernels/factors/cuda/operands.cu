// Gathers the factors of matrix products over all steps, token by token: the inputs of each step, or the hidden states that
// each step reads. Values after the end of a sequence, padding, and hidden states at the steps that begin an episode are
// zeros.
//
// With HALVES, token n's values are multiplied by 2^(C - a_n), where 2^a_n is the power of two of the token's gradients
// (scales.cuh), so that all terms of a sum over tokens have the scale 2^C. C brings the largest value to [2^14, 2^15) where a_n
// is smallest.
// Compile-time constants: BYTES and HALVES (see word.cuh), of which every row and width is a whole number of words; RESETS.
#include "word.cuh"

struct Operand {
    const Word* source;    // the values of the sequence's first step
    const Word* first;     // [B, columns]: the values for the step that a row begins with; read only if `shift` is not 0
    Stored* target;        // [tokens, width]
    long long step, row;   // the distance from one step, and from one row, to the next in the source, in words
    int columns, width;
    int stride;            // the distance from one token to the next in the target, in words
    int shift;             // step t reads the values of step t + shift: 0, -1 or, in the reverse direction, 1
    int start;             // the steps of the sequence before the first one here
    const int* exponents;  // [tokens]: those of the tokens' gradients; read with HALVES, as what follows
    const int* largest_gradient;
    const int* largest;    // of the values
};

// The token of step t and row n has index t * step + n * row.
struct Operands {
    Operand of[4];
    const long long* lengths;  // [B], or null
    int total;                 // the steps of the sequence
    int time, batch;
    int step, row;
#if RESETS
    const unsigned char* resets;  // [total, B]
#endif
};

#if HALVES
constexpr int LEAST = -64;  // smaller powers of two make zeros of all values

__device__ __forceinline__ Scale scale_of(const Operand& own, long long token) {
    const int relative = own.exponents[token] - exponent_of_largest(*own.largest_gradient);
    return Scale::of(TOP - exponent_of_largest(*own.largest) + max(relative, LEAST));
}
#else
__device__ __forceinline__ Scale scale_of(const Operand&, long long) { return {}; }
#endif

extern "C" __global__ void recurrent_operands(const Operands p) {
    const Operand& own = p.of[blockIdx.y];
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const Word* const source = own.source;
    const Word* const first = own.first;
    Stored* const target = own.target;
    const int columns = own.columns, width = own.width, shift = own.shift, start = own.start;
    for (int token = blockIdx.x * warps + (threadIdx.x >> 5); token < p.time * p.batch; token += gridDim.x * warps) {
        const int t = token / p.batch, n = token % p.batch, step = start + t, there = step + shift;
        const int end = p.lengths ? (int)max(0ll, min((long long)p.total, p.lengths[n])) : p.total;
        const bool begins = shift && (there < 0 || there >= end);
        const Word* const from = begins ? first + (size_t)n * columns : source + there * own.step + n * own.row;
        const long long place = t * (long long)p.step + n * (long long)p.row;
        Stored* const to = target + (size_t)place * own.stride;
        const Scale scale = scale_of(own, place);
        int filled = step < end ? columns : 0;
#if RESETS
        // In the reverse direction, a row starts at its last step, which no reset separates from a step after it.
        const int border = shift > 0 ? there : step;
        if (shift && border < end && p.resets[(size_t)border * p.batch + n]) filled = 0;
#endif
#pragma unroll 4
        for (int column = lane; column < width; column += 32) to[column] = column < filled ? stored(from[column], scale) : zero();
    }
}

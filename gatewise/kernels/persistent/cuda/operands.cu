// Gathers the factors of matrix products over all steps, token by token (see gathered.cuh), padded with zeros.
//
// With HALVES, the values of token n and column j are multiplied by 2^(14 + a_n - s_j), with a_n the exponent of the token's
// largest gradient and s_j that of the column's largest terms (scales.cuh). All terms of a sum over tokens then have the same
// scale, and all values are below 2^15.
//
// A thread copies a word of each of AT_ONCE tokens; all its loads are on their way before the first value arrives.
// Compile-time constants: BYTES and HALVES (see word.cuh), of which every row and width is a whole number of words; AT_ONCE; RESETS.
#include "word.cuh"
#include "gathered.cuh"

struct Operand {
    Source source;
    Stored* target;            // [tokens, width]
    int width;
    int stride;                // the distance from one token to the next in the target, in words
    const int* exponents;      // [tokens]: those of the tokens' largest gradients; read with HALVES, as what follows
    const int* largest_terms;  // the exponent of each column's largest terms
};

struct Operands {
    Operand of[4];
    Tokens tokens;
};

extern "C" __global__ void recurrent_operands(const Operands p) {
    const Operand& own = p.of[blockIdx.z];
    const Source source = own.source;
    const int first = blockIdx.x * AT_ONCE, column = blockIdx.y * blockDim.x + threadIdx.x, count = p.tokens.count();
    if (column >= own.width) return;
    Scales scales = {};
    if (column < source.columns) scales = scales_of(own.largest_terms, column);
    Word words[AT_ONCE];
    int places[AT_ONCE], exponents[AT_ONCE];
    int t = first / p.tokens.batch, n = first % p.tokens.batch;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        if (first + i >= count) t = n = 0;  // a token that is read, and not copied
        const Token at(p.tokens, t, n);
        const Gathered read(source, p.tokens, at);
        words[i] = column < read.filled ? read.from[column] : Word{};
        places[i] = at.index, exponents[i] = HALVES ? own.exponents[at.index] : 0;
        if (++n == p.tokens.batch) n = 0, ++t;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
        if (first + i < count) own.target[(size_t)places[i] * own.stride + column] = stored(words[i], scales, exponents[i]);
}

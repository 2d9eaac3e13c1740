// Gathers the factors of matrix products over all steps, token by token (see gathered.cuh), padded with zeros.
//
// With HALVES, the values of token n and column j are multiplied by 2^(14 + a_n - s_j), with a_n the exponent of the token's
// largest gradient and s_j that of the column's largest terms (scales.cuh). All terms of a sum over tokens then have the same
// scale, and all values are below 2^15.
// Compile-time constants: BYTES and HALVES (see word.cuh), of which every row and width is a whole number of words; RESETS.
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
    const Operand& own = p.of[blockIdx.y];
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const Source source = own.source;
    Stored* const target = own.target;
    const int width = own.width;
    for (int number = blockIdx.x * warps + (threadIdx.x >> 5); number < p.tokens.count(); number += gridDim.x * warps) {
        const Token at(p.tokens, number);
        const Gathered read(source, p.tokens, at);
        Stored* const to = target + (size_t)at.index * own.stride;
        const int exponent = HALVES ? own.exponents[at.index] : 0;
#pragma unroll 4
        for (int column = lane; column < width; column += 32) to[column] = column < read.filled ? stored(read.from[column], scales_of(own.largest_terms, exponent, column)) : zero();
    }
}

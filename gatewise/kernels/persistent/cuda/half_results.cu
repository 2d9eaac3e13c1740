// Divides the results of products of float16 factors by the factors' powers of two (see scales.cuh), adds up those of both
// directions, and crops their padding. A result may take the place of its product.
// Compile-time constants: BYTES, the size of a word, 4, 8 or 16, of which every row is a whole number; DTYPE (see numbers.cuh).
#include "scales.cuh"

struct alignas(BYTES) Word {
    float at[BYTES / 4];
};

// A row of a product has the powers of two of the row's gradients and of the matrix, or that of all terms of a sum over tokens.
struct Part {
    const Word* product;      // or null
    long long stride;         // the distance from one row of the product to the next, in words
    const int* exponents;     // of each row's gradients; null where the result is a sum over tokens
    const int* largest;       // the bits of the matrix's largest magnitude
    const int* largest_term;  // the exponent of the largest terms of a sum over tokens
};

struct Result {
    Part parts[2];
    Word* to;                  // [rows, columns]
    int product_group, group;  // the rows of a group of the products, and of the result
    int rows, columns;
};

struct Results {
    Result of[2];
};

// The exponent that all rows have, and the power of two of a row.
__device__ __forceinline__ int exponent_of(const Part& own) {
    return own.exponents ? exponent_of_largest(*own.largest) : *own.largest_term;
}
__device__ __forceinline__ Scale scale_of(const Part& own, int exponent, int row) {
    return Scale::of(exponent + (own.exponents ? own.exponents[row] : 0) - 2 * TOP);
}

extern "C" __global__ void recurrent_half_results(const Results p) {
    const Result& own = p.of[blockIdx.y];
    const bool both = own.parts[1].product;
    const int exponent = exponent_of(own.parts[0]), exponent_of_other = both ? exponent_of(own.parts[1]) : 0;
    for (int row = blockIdx.x; row < own.rows; row += gridDim.x) {
        const size_t place = row / own.group * own.product_group + row % own.group;
        const Word* const products = own.parts[0].product + place * own.parts[0].stride;
        const Word* const others = both ? own.parts[1].product + place * own.parts[1].stride : products;
        const Scale scale = scale_of(own.parts[0], exponent, row);
        const Scale other = both ? scale_of(own.parts[1], exponent_of_other, row) : scale;
        for (int column = threadIdx.x; column < own.columns; column += blockDim.x) {
            Word word = products[column];
            const Word more = both ? others[column] : word;
#pragma unroll
            for (int i = 0; i < BYTES / 4; ++i) word.at[i] = scale(word.at[i]) + (both ? other(more.at[i]) : 0.f);
            own.to[(size_t)row * own.columns + column] = word;
        }
    }
}

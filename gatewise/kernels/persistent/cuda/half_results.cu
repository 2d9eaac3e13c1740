// Divides the results of products of float16 factors by the factors' powers of two (see scales.cuh), adds up those of both
// directions, and crops their padding. A result may take the place of its product.
//
// A thread writes a word of each of AT_ONCE rows; all its loads are on their way before the first value arrives.
// Compile-time constants: BYTES, the size of a word, 4, 8 or 16, of which every row is a whole number; AT_ONCE; DTYPE (see numbers.cuh).
#include "scales.cuh"

constexpr int NUMBERS = BYTES / 4;  // of a word

struct alignas(BYTES) Word {
    float at[NUMBERS];
};

// The powers of two of a number of a product are those of its row and of its column.
struct Part {
    const Word* product;  // or null
    long long stride;     // the distance from one row of the product to the next, in words
    const int* row_exponents;     // of the rows' gradients; null where the result is a sum over tokens
    const int* column_exponents;  // of the columns' largest terms, or of those of the other factor
};

struct Result {
    Part parts[2];
    Word* to;                  // [rows, columns]
    long long stride;          // the distance from one of its rows to the next, in words
    int product_group, group;  // the rows of a group of the products, and of the result
    int rows, columns;
};

struct Results {
    Result of[2];
};

// The word is no reference, with which each of its numbers would take a load.
__device__ __forceinline__ Word scaled(Word word, const Exponents<NUMBERS>& columns, int row) {
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) word.at[i] = Scale::of(row + columns.at[i] - 2 * TOP)(word.at[i]);
    return word;
}

extern "C" __global__ void recurrent_half_results(const Results p) {
    const Result& own = p.of[blockIdx.z];
    const int first = blockIdx.x * AT_ONCE, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= own.columns || first >= own.rows) return;
    Word words[2][AT_ONCE];
    int rows[2][AT_ONCE];
    Exponents<NUMBERS> columns[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const Part& part = own.parts[k];
        if (!part.product) continue;
        columns[k] = ((const Exponents<NUMBERS>*)part.column_exponents)[column];
        int within = first % own.group;
        const Word* from = part.product + (first / own.group * own.product_group + within) * part.stride + column;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, from += part.stride) {
            if (first + i >= own.rows) continue;
            words[k][i] = *from;
            rows[k][i] = part.row_exponents ? part.row_exponents[first + i] : 0;
            if (++within == own.group) within = 0, from += (own.product_group - own.group) * part.stride;
        }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        if (first + i >= own.rows) continue;
        Word word = scaled(words[0][i], columns[0], rows[0][i]);
        if (own.parts[1].product) {
            const Word more = scaled(words[1][i], columns[1], rows[1][i]);
#pragma unroll
            for (int number = 0; number < NUMBERS; ++number) word.at[number] += more.at[number];
        }
        own.to[(first + i) * own.stride + column] = word;
    }
}

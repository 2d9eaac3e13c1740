// Divides the results of products of float16 factors by the factors' powers of two (see scales.cuh), adds up those of both
// directions, and crops their padding. A result may take the place of its product.
// Compile-time constants: BYTES, the size of a word, 4, 8 or 16, of which every row is a whole number; DTYPE (see numbers.cuh).
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
__device__ __forceinline__ Word scaled(Word word, const Part& own, int row, int column) {
    const Exponents<NUMBERS> exponents = ((const Exponents<NUMBERS>*)own.column_exponents)[column];
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) word.at[i] = Scale::of(row + exponents.at[i] - 2 * TOP)(word.at[i]);
    return word;
}

extern "C" __global__ void recurrent_half_results(const Results p) {
    const Result& own = p.of[blockIdx.y];
    const Part &part = own.parts[0], &other = own.parts[1];
    for (int row = blockIdx.x; row < own.rows; row += gridDim.x) {
        const size_t place = row / own.group * own.product_group + row % own.group;
        const int of_row = part.row_exponents ? part.row_exponents[row] : 0, of_other = other.row_exponents ? other.row_exponents[row] : 0;
        for (int column = threadIdx.x; column < own.columns; column += blockDim.x) {
            Word word = scaled(part.product[place * part.stride + column], part, of_row, column);
            if (other.product) {
                const Word more = scaled(other.product[place * other.stride + column], other, of_other, column);
#pragma unroll
                for (int i = 0; i < NUMBERS; ++i) word.at[i] += more.at[i];
            }
            own.to[row * own.stride + column] = word;
        }
    }
}

// Copies a matrix whose rows come in groups to one of another size: each group is padded with zeros, or cropped.
// With HALVES, the values of a column are multiplied by the power of two of the column's largest one (see scales.cuh).
// Compile-time constants: BYTES and HALVES (see word.cuh), of which every row and width is a whole number of words.
#include "word.cuh"

struct Fit {
    const Word* from;
    Stored* to;                         // [rows, columns]
    long long stride;                   // the distance from one row of `from` to the next, in words
    int from_group, from_columns;       // the rows of a group, and the columns, of `from`
    int rows, group, columns;
    const int* largest;                 // the exponent of each column's largest value; read with HALVES
};

extern "C" __global__ void recurrent_fit(const Fit p) {
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const int within = row % p.group;
        const Word* const from = p.from + (size_t)(row / p.group * p.from_group + within) * p.stride;
        Stored* const to = p.to + (size_t)row * p.columns;
        const int filled = within < p.from_group ? min(p.from_columns, p.columns) : 0;
#pragma unroll 4
        for (int column = threadIdx.x; column < p.columns; column += blockDim.x) to[column] = column < filled ? stored(from[column], scales_of(p.largest, 0, column)) : zero();
    }
}

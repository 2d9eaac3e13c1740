// Copies a matrix whose rows come in groups to one of another size: each group is padded with zeros, or cropped.
// With HALVES, the values of a column are multiplied by the power of two of the column's largest one (see scales.cuh).
//
// A thread copies a word of each of AT_ONCE rows; all its loads are on their way before the first value arrives.
// Compile-time constants: BYTES and HALVES (see word.cuh), of which every row and width is a whole number of words; AT_ONCE.
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
    const int first = blockIdx.x * AT_ONCE, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= p.columns) return;
    const bool exists = column < p.from_columns;
    Scales scales = {};
    if (exists) scales = scales_of(p.largest, column);
    int within = first % p.group;
    const Word* from = p.from + (first / p.group * p.from_group + within) * p.stride + column;
    Word words[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i, from += p.stride) {
        words[i] = exists && within < p.from_group && first + i < p.rows ? *from : Word{};
        if (++within == p.group) within = 0, from += (p.from_group - p.group) * p.stride;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
        if (first + i < p.rows) p.to[(size_t)(first + i) * p.columns + column] = stored(words[i], scales, 0);
}

// Lays out what products over all steps read, token by token: inputs without what lies beyond the ends of sequences, and
// the hidden states that went into each step. Beyond the ends, and beyond the columns, there are zeros.
// Compile-time: BYTES of a word, 2, 4, 8 or 16; every row and width is a whole number of words.
#include "word.cuh"

struct Operand {
    const Word* source;    // of the sequence's first step
    const Word* first;     // [B, columns]: what goes into the step that a row begins with, if it is not the step's own
    Word* target;          // [tokens, width]
    long long step, row;   // words of the source from one step, and from one row, to the next
    int columns, width;
    int shift;             // what goes into step t is of step t + shift: 0, -1 or, in the reverse direction, 1
    int start;             // steps of the sequence before the first one here
};

// The token of step t and row n is t * step + n * row.
struct Operands {
    Operand of[4];
    const long long* lengths;  // [B], or null
    int total;                 // steps of the sequence
    int time, batch;
    int step, row;
};

extern "C" __global__ void recurrent_operands(const Operands p) {
    const Operand& own = p.of[blockIdx.y];
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const Word* const source = own.source;
    const Word* const first = own.first;
    Word* const target = own.target;
    const int columns = own.columns, width = own.width, shift = own.shift, start = own.start;
    for (int token = blockIdx.x * warps + (threadIdx.x >> 5); token < p.time * p.batch; token += gridDim.x * warps) {
        const int t = token / p.batch, n = token % p.batch, step = start + t, there = step + shift;
        const int end = p.lengths ? (int)max(0ll, min((long long)p.total, p.lengths[n])) : p.total;
        const bool begins = shift && (there < 0 || there >= end);
        const Word* const from = begins ? first + (size_t)n * columns : source + there * own.step + n * own.row;
        Word* const to = target + (size_t)(t * (long long)p.step + n * (long long)p.row) * width;
        const int filled = step < end ? columns : 0;
#pragma unroll 4
        for (int column = lane; column < width; column += 32) to[column] = column < filled ? from[column] : zero();
    }
}

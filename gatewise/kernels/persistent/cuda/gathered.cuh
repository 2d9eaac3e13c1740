// What a product over all steps multiplies with the gradients of each token: the inputs of the token's step, or the hidden
// states that the step reads. Values after the end of a sequence, and hidden states at the steps that begin an episode (see
// episodes.cuh), are zeros.
//
// Includers define Word, of which every row is a whole number, and the macro RESETS.
#pragma once

struct Source {
    const Word* values;   // of the sequence's first step
    const Word* first;    // [B, columns]: the values for the step that a row begins with; read only if `shift` is not 0
    long long step, row;  // the distance from one step, and from one row, to the next, in words
    int columns;
    int shift;            // step t reads the values of step t + shift: 0, -1 or, in the reverse direction, 1
    int start;            // the steps of the sequence before the first one here
};

// The token of step t and row n has index t * step + n * row.
struct Tokens {
    const long long* lengths;     // [B], or null
    const unsigned char* resets;  // [total, B]; read only with RESETS
    int total;                    // the steps of the sequence
    int time, batch;
    int step, row;

    __device__ __forceinline__ int count() const { return time * batch; }
};

// A token: its step and row, its index, and the end of its sequence.
struct Token {
    int t, n, end, index;

    __device__ __forceinline__ Token(const Tokens& p, int number) : Token(p, number / p.batch, number % p.batch) {}
    __device__ __forceinline__ Token(const Tokens& p, int step, int row) : t(step), n(row) {
        end = p.lengths ? (int)max(0ll, min((long long)p.total, p.lengths[n])) : p.total;
        index = t * p.step + n * p.row;
    }
};

// The values of a token: `filled` words, and zeros behind them.
struct Gathered {
    const Word* from;
    int filled;

    __device__ __forceinline__ Gathered(const Source& own, const Tokens& p, const Token& at) {
        const int step = own.start + at.t, there = step + own.shift;
        const bool begins = own.shift && (there < 0 || there >= at.end);
        from = begins ? own.first + (size_t)at.n * own.columns : own.values + there * own.step + at.n * own.row;
        filled = step < at.end ? own.columns : 0;
#if RESETS
        // In the reverse direction, a row starts at its last step, which no reset separates from a step after it.
        const int border = own.shift > 0 ? there : step;
        if (own.shift && border < at.end && p.resets[(size_t)border * p.batch + at.n]) filled = 0;
#endif
    }
};

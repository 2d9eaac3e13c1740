// One decoder step of additive attention and the surrounding element-wise operations: the softmax over the source, the
// context, and the attentional output that is fed to the next step; and the backward pass from the gradient of that
// output to the gradient of the query.
//
// Each block handles one sentence. Its warps take source positions in turn, PLACES at a time; a warp's lanes lie along
// the features, WIDTH adjacent features each, in CHUNKS pieces. Keys and values do not depend on the preceding kernel: as
// many of them as fit in registers are loaded while that kernel still runs.
#include "activations.cuh"
#include "operand.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int LONGEST = 2048;  // the most source positions that fit into the backward pass's shared memory
constexpr int FEATURES = CHUNKS * 32 * WIDTH;
#define NOTHING (-Float32::infinity())

__device__ __forceinline__ float squashed(float x) {
#if VALUE_BYTES == 2 || HALVES
    return ApproximateActivations::tanh_of(x);
#else
    return AccurateActivations::tanh_of(x);
#endif
}

__device__ __forceinline__ float exponential(float x) {
#if VALUE_BYTES == 2 || HALVES
    return __expf(x);
#else
    return expf(x);
#endif
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

// The index of a lane's first feature in a piece; and a lane's features of a row.
__device__ __forceinline__ int feature(int chunk) { return (chunk * 32 + threadIdx.x % 32) * WIDTH; }

struct Row {
    Values at[CHUNKS];

    __device__ __forceinline__ void read(const Value* from, int size) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (feature(chunk) < size) {
                at[chunk] = load(from + feature(chunk));
            } else {
#pragma unroll
                for (int k = 0; k < WIDTH; k++) at[chunk].at[k] = narrowed(0);
            }
        }
    }

    __device__ __forceinline__ float operator()(int chunk, int k) const { return widened(at[chunk].at[k]); }
};

// A lane's features of a row of keys or values, in the dtype of operands.
struct SourceRow {
    Operands at[CHUNKS];

    __device__ __forceinline__ void read(const Operand* from, int size) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            if (feature(chunk) < size) {
                at[chunk] = load_operands(from + feature(chunk));
            } else {
#pragma unroll
                for (int k = 0; k < WIDTH; k++) at[chunk].at[k] = operand(0);
            }
        }
    }

    __device__ __forceinline__ float operator()(int chunk, int k) const { return of_operand(at[chunk].at[k]); }
};

// Adjacent sums of a thread, which one instruction moves to or from shared memory.
constexpr int PACKED = WIDTH < 4 ? WIDTH : 4;

struct alignas(PACKED * sizeof(float)) Pack {
    float at[PACKED];
};

// Adds the warps' sums over their positions to the block's sums in `total`, half of the warps at a time.
__device__ __forceinline__ void add_warps(const float (&own)[CHUNKS][WIDTH], float (*shared)[FEATURES], float* total) {
    const int warp = threadIdx.x / 32;
    for (int half = 0; half < 2; half++) {
        if (warp / (WARPS / 2) == half)
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
                for (int k = 0; k < WIDTH; k += PACKED) {
                    Pack* const place = (Pack*)&shared[warp % (WARPS / 2)][feature(chunk) + k];
                    Pack sums;
                    if (half) sums = *place;
#pragma unroll
                    for (int n = 0; n < PACKED; n++)
                        sums.at[n] = half ? sums.at[n] + own[chunk][k + n] : own[chunk][k + n];
                    *place = sums;
                }
        __syncthreads();
    }
    for (int column = threadIdx.x; column < FEATURES; column += THREADS) {
        float sum = 0;
#pragma unroll
        for (int other = 0; other < WARPS / 2; other++) sum += shared[other][column];
        total[column] = sum;
    }
}

struct Source {
    const Operand* keys;    // [S, B, A]
    const Operand* values;  // [S, B, H]
    const i64* lengths;     // [B] or null
    const Value* v;         // [A]
    i64 keys_step, keys_row, values_step, values_row;
    int source, features, units;
};

__device__ __forceinline__ int length_of(const Source& a, i64 row) {
    if (!a.lengths) return a.source;
    const i64 length = a.lengths[row];
    return length < 0 ? 0 : length > a.source ? a.source : (int)length;
}

struct Attend {
    Source from;
    const Value* query;  // [B, A]
    const Value* state;  // the contribution of the hidden state, added to the context [B, H]
    float* scores;       // for the backward pass [B, S]; or null
    float* normaliser;   // the log-sum-exp of the scores [B]
    Value* context;      // for the backward pass too [B, H]
    Value* output;       // the attentional output [B, H]; or null
    Operand* fed;        // the attentional output as an operand of the next step
    const Flag* mask;    // the units that dropout keeps; null for all
    i64 query_row, state_row, context_row, output_row, fed_row;
    double scale;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) feeding_attend(const Attend a) {
    alignas(16) __shared__ float shared[WARPS / 2][FEATURES];
    __shared__ float scores[2][WARPS * PLACES], total_context[FEATURES];
    const i64 row = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, length = length_of(a.from, row);
    const Operand* const keys = a.from.keys + row * a.from.keys_row;
    const Operand* const values = a.from.values + row * a.from.values_row;
    Row v;
    SourceRow place[PLACES];
    v.read(a.from.v, a.from.features);
#pragma unroll
    for (int p = 0; p < PLACES; p++) {
        const int position = p * WARPS + warp;
        if (position < length) place[p].read(keys + position * a.from.keys_step, a.from.features);
    }

    wait_for_preceding_kernel();
    Row query;
    query.read(a.query + row * a.query_row, a.from.features);
    float largest = NOTHING, total = 0, sums[CHUNKS][WIDTH];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int k = 0; k < WIDTH; k++) sums[chunk][k] = 0;
    for (int first = 0, turn = 0; first < length; first += WARPS * PLACES, turn ^= 1) {
        float own[PLACES];
#pragma unroll
        for (int p = 0; p < PLACES; p++) {
            const int position = first + p * WARPS + warp;
            own[p] = NOTHING;
            if (position < length) {
                if (first) place[p].read(keys + position * a.from.keys_step, a.from.features);
                float score = 0;
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
                    for (int k = 0; k < WIDTH; k++)
                        score += v(chunk, k) * squashed(query(chunk, k) + place[p](chunk, k));
                own[p] = sum_of_warp(score);
                place[p].read(values + position * a.from.values_step, a.from.units);
                if (lane == 0 && a.scores) a.scores[row * a.from.source + position] = own[p];
            }
            if (lane == 0) scores[turn][p * WARPS + warp] = own[p];
        }
        __syncthreads();
        float larger = largest;
#pragma unroll
        for (int p = 0; p < WARPS * PLACES / 32; p++) larger = fmaxf(larger, scores[turn][p * 32 + lane]);
        larger = largest_of_warp(larger);
        const float base = larger == NOTHING ? 0 : larger, shrunk = exponential(largest - base);
        float share = 0;
#pragma unroll
        for (int p = 0; p < WARPS * PLACES / 32; p++) share += exponential(scores[turn][p * 32 + lane] - base);
        total = total * shrunk + sum_of_warp(share);
        largest = larger;
#pragma unroll
        for (int p = 0; p < PLACES; p++) own[p] = exponential(own[p] - base);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                float sum = sums[chunk][k] * shrunk;
#pragma unroll
                for (int p = 0; p < PLACES; p++)
                    if (first + p * WARPS + warp < length) sum += own[p] * place[p](chunk, k);
                sums[chunk][k] = sum;
            }
    }
    // The sum of a sentence of length 0 is zero; a NaN must remain NaN.
    if (total == 0) total = 1;
    if (threadIdx.x == 0 && a.normaliser) a.normaliser[row] = largest + logf(total);
    add_warps(sums, shared, total_context);
    for (int column = threadIdx.x; column < a.from.units; column += THREADS) {
        const float context = total_context[column] / total;
        float out = tanh_of(context + widened(a.state[row * a.state_row + column]));
        if (a.mask) out = a.mask[row * a.from.units + column] ? out * (float)a.scale : 0.f;
        if (a.context) a.context[row * a.context_row + column] = narrowed(context);
        if (a.output) a.output[row * a.output_row + column] = narrowed(out);
        a.fed[row * a.fed_row + column] = operand(out);
    }
}

struct AttendGradient {
    Source from;
    const Value* query;        // [B, A]
    const float* scores;       // from the forward pass
    const float* normaliser;   // from the forward pass
    const Value* output;       // of the forward pass [B, H]
    const Value* dy;           // the gradient of the output from the loss; or null
    Planes later;              // the gradient of the output from the next step
    Value* dsums;              // the gradient of context + state [B, H]
    Value* dquery;             // [B, A]
    const Flag* mask;
    i64 query_row, output_row, dy_row, dsums_row, dquery_row;
    double scale;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) feeding_attend_gradient(const AttendGradient a) {
    alignas(16) __shared__ float shared[WARPS / 2][FEATURES], given[FEATURES];
    __shared__ float above[LONGEST], of_warps[WARPS];
    const i64 row = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, length = length_of(a.from, row);
    const Operand* const keys = a.from.keys + row * a.from.keys_row;
    const Operand* const values = a.from.values + row * a.from.values_row;
    const float* const scores = a.scores + row * a.from.source;
    const float normaliser = a.normaliser[row];
    SourceRow place[PLACES];
#pragma unroll
    for (int p = 0; p < PLACES; p++) {
        const int position = p * WARPS + warp;
        if (position < length) place[p].read(values + position * a.from.values_step, a.from.units);
    }

    wait_for_preceding_kernel();
    for (int column = threadIdx.x; column < FEATURES; column += THREADS) {
        float d = 0;
        if (column < a.from.units) {
            float squash = widened(a.output[row * a.output_row + column]);
            if (a.dy) d = widened(a.dy[row * a.dy_row + column]);
            if (a.later.planes) {
                const float scale = a.later.scale ? a.later.scale[row] : 1.f;
                for (int part = 0; part < a.later.parts; part++)
                    d += widened(a.later.planes[row * a.later.row + part * a.later.part + column]) * scale;
            }
            // The tanh of a dropped unit is lost, but its gradient is zero anyway.
            if (a.mask) {
                squash /= (float)a.scale;
                d = a.mask[row * a.from.units + column] ? d * (float)a.scale : 0.f;
            }
            const Value rounded = narrowed(d * (1.f - squash * squash));
            a.dsums[row * a.dsums_row + column] = rounded;
            d = widened(rounded);
        }
        given[column] = d;
    }
    __syncthreads();
    float of_values[CHUNKS][WIDTH];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int k = 0; k < WIDTH; k += PACKED) {
            const Pack found = *(const Pack*)&given[feature(chunk) + k];
#pragma unroll
            for (int n = 0; n < PACKED; n++) of_values[chunk][k + n] = found.at[n];
        }
    const bool one_round = length <= WARPS * PLACES;  // keys are then loaded into the registers of values
    float mean = 0;
    for (int first = 0; first < length; first += WARPS * PLACES)
#pragma unroll
        for (int p = 0; p < PLACES; p++) {
            const int position = first + p * WARPS + warp;
            if (position >= length) continue;
            if (first) place[p].read(values + position * a.from.values_step, a.from.units);
            float sum = 0;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
                for (int k = 0; k < WIDTH; k++) sum += place[p](chunk, k) * of_values[chunk][k];
            sum = sum_of_warp(sum);
            if (one_round) place[p].read(keys + position * a.from.keys_step, a.from.features);
            if (lane == 0) above[position] = sum;
            mean += exponential(scores[position] - normaliser) * sum;
        }
    if (lane == 0) of_warps[warp] = mean;
    Row query, v;
    query.read(a.query + row * a.query_row, a.from.features);
    v.read(a.from.v, a.from.features);
    __syncthreads();
    mean = 0;
#pragma unroll
    for (int other = 0; other < WARPS; other++) mean += of_warps[other];
    float sums[CHUNKS][WIDTH];
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int k = 0; k < WIDTH; k++) sums[chunk][k] = 0;
    for (int first = 0; first < length; first += WARPS * PLACES)
#pragma unroll
        for (int p = 0; p < PLACES; p++) {
            const int position = first + p * WARPS + warp;
            if (position >= length) continue;
            if (!one_round) place[p].read(keys + position * a.from.keys_step, a.from.features);
            const float dscore = exponential(scores[position] - normaliser) * (above[position] - mean);
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
                for (int k = 0; k < WIDTH; k++) {
                    const float m = squashed(query(chunk, k) + place[p](chunk, k));
                    sums[chunk][k] += dscore * (1.f - m * m);
                }
        }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int k = 0; k < WIDTH; k++) sums[chunk][k] *= v(chunk, k);
    add_warps(sums, shared, given);
    for (int column = threadIdx.x; column < a.from.features; column += THREADS)
        a.dquery[row * a.dquery_row + column] = narrowed(given[column]);
}

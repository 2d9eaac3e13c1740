// A single time step of a layer for a few sequences: both products, the step of the cell, and the new states, in one launch.
//
// A warp computes one hidden unit. Its lanes read the unit's rows of both weight matrices once, multiply them by the inputs and
// the hidden states of all sequences, and add up their parts by shuffles; lane b then computes the step of sequence b.
//
// All blocks read the hidden states before the step. So they store the new ones apart, and the block that ends last copies them to
// the place of the old ones: a step leaves its states where it found them, and no block waits for another one.
#include "row_cell.cuh"
#include "shuffles.cuh"
#include "vectors.cuh"

constexpr int LANES = 32, THREADS = LANES * WARPS;
static_assert(STATISTICS == 0, "each lane knows one unit");
static_assert(PARAMETERS <= MOST_PARAMETERS, "the struct has as many pointers");

struct Single {
    const Value* x;                            // the input [B, I]
    const Value* input_weights;                // [GATES * H, I]
    const Value* recurrent_weights;            // [GATES * H, H]
    const Value* input_bias;                   // [GATES * H], or null, as the next one
    const Value* recurrent_bias;
    const Value* parameters[MOST_PARAMETERS];  // of the cell [H]
    Value* hidden;                             // the hidden states [B, H]; overwritten by the last block
    Value* next;                               // the hidden states after the step [B, H]
    Real* carried;                             // the carried states [CARRIED, B, H]; overwritten
    Value* output;                             // the hidden states after the step once more [B, H], or null
    u32* finished;                             // the number of blocks that have ended; 0 before and after a launch
    int batch, inputs, units;                  // B, I and H
};

template <bool RECURRENT>
__device__ __forceinline__ constexpr int gate_of(int sum) {
    return RECURRENT ? recurrent_gate(sum) : input_gate(sum);
}

// Adds a lane's part of the products of a unit's rows of a matrix [GATES * H, size] with vectors [B, size]. Sequences after the
// last one take its values.
template <bool RECURRENT>
__device__ __forceinline__ void add_products(
    const Value* matrix, const Value* vectors, int size, int unit, const Single& p, Real (&sums)[SUMS][ROWS]) {
#pragma unroll 4
    for (int k = (threadIdx.x % LANES) * WIDTH; k < size; k += LANES * WIDTH) {
        Values weights[SUMS];
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++)
            if (gate_of<RECURRENT>(sum) >= 0)
                weights[sum] = load(matrix + ((i64)gate_of<RECURRENT>(sum) * p.units + unit) * size + k);
#pragma unroll
        for (int b = 0; b < ROWS; b++) {
            const Values own = load(vectors + (i64)(b < p.batch ? b : p.batch - 1) * size + k);
#pragma unroll
            for (int sum = 0; sum < SUMS; sum++)
                if (gate_of<RECURRENT>(sum) >= 0)
#pragma unroll
                    for (int i = 0; i < WIDTH; i++) sums[sum][b] += widened(weights[sum].at[i]) * widened(own.at[i]);
        }
    }
}

// The step of a unit, which all lanes of a warp call.
__device__ __forceinline__ void step_of_unit(const Single& p, int unit) {
    const int lane = threadIdx.x % LANES;
    Real sums[SUMS][ROWS] = {};
    add_products<false>(p.input_weights, p.x, p.inputs, unit, p, sums);
    add_products<true>(p.recurrent_weights, p.hidden, p.units, unit, p, sums);
    Given given[1];
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++)
#pragma unroll
        for (int b = 0; b < ROWS; b++) {
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance /= 2)
                sums[sum][b] += __shfl_xor_sync(EVERY_LANE, sums[sum][b], distance);
            if (b == 0 || lane == b) given[0].sums[sum] = sums[sum][b];
        }
    if (lane >= p.batch) return;
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++) {
        if (p.input_bias && input_gate(sum) >= 0) given[0].sums[sum] += widened(p.input_bias[input_gate(sum) * p.units + unit]);
        if (p.recurrent_bias && recurrent_gate(sum) >= 0)
            given[0].sums[sum] += widened(p.recurrent_bias[recurrent_gate(sum) * p.units + unit]);
    }
    const int place = lane * p.units + unit, plane = p.batch * p.units;
#pragma unroll
    for (int i = 0; i < CARRIED; i++) given[0].states[i] = p.carried[i * plane + place];
#pragma unroll
    for (int i = 0; i < PARAMETERS; i++) given[0].parameters[i] = widened(p.parameters[i][unit]);
    Returned returned[1];
    Real statistics[1][STATISTICS + 1];
    struct {
    } alone;  // the step combines no units
    step_of_row(given, returned, statistics, alone);
    const Value hidden = narrowed(returned[0].hidden);
    p.next[place] = hidden;
    if (p.output) p.output[place] = hidden;
#pragma unroll
    for (int i = 0; i < CARRIED; i++) p.carried[i * plane + place] = i < STATES ? returned[0].states[i] : returned[0].hidden;
}

extern "C" __global__ void __launch_bounds__(THREADS) single_step(const Single p) {
    const int unit = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (unit < p.units) step_of_unit(p, unit);
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.finished, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    const volatile Value* const next = p.next;
    for (int i = threadIdx.x; i < p.batch * p.units; i += THREADS) p.hidden[i] = next[i];
    if (threadIdx.x == 0) *p.finished = 0;
}

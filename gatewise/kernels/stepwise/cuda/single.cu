// A single time step of a layer for a few sequences: both products, the step of the cell, and the new states, in one launch.
//
// A block computes one hidden unit. Its threads read the unit's rows of both weight matrices once, multiply them by the inputs
// and the hidden states of all sequences, and add up the products; thread b then computes the step of sequence b.
//
// `single_step` keeps the states where they are. Blocks store new hidden states while others still read the old ones, so there
// are two buffers, which steps read in turn. Blocks count themselves, modulo the number of blocks in two steps, and the count
// tells whose turn it is. So the arguments are the same in every step, and the replays of a CUDA graph carry the states. No
// block waits for another one. `single_call` reads the states before the step from one tensor and writes those after it to
// another one.
//
// From compute capability 9.0 on, the launch for a layer starts while the one for the layer below it still runs, and loads its
// first weights. The first layer's does not, because what runs before it may write weights or states.
#include "launch.cuh"
#include "row_cell.cuh"
#include "shuffles.cuh"
#include "vectors.cuh"

constexpr int LANES = 32, THREADS = LANES * WARPS;
static_assert(STATISTICS == 0, "a block knows one unit");
static_assert(PARAMETERS <= MOST_PARAMETERS, "the struct has as many pointers");

struct Single {
    const Value* x;                            // the input [B, I]
    const Value* input_weights;                // [GATES * H, I]
    const Value* recurrent_weights;            // [GATES * H, H]
    const Value* input_bias;                   // [GATES * H], or null, as the next one
    const Value* recurrent_bias;
    const Value* parameters[MOST_PARAMETERS];  // of the cell [H]
    int batch, inputs, units;                  // B, I and H
    int is_last;                               // whether this is the last layer
};

struct Held {
    Single of;
    Value* hidden;   // the hidden states before and after the step [2, B, H], in an order that changes
    Real* carried;   // the carried states [CARRIED, B, H]; overwritten
    Value* output;   // the hidden states after the step once more [B, H]
    u32* begun;      // the number of blocks that have begun, modulo 2 H
};

struct Call {
    Single of;
    const Value* hidden;        // the hidden states before the step [B, H]
    const Value* others;        // the other states before the step [B, STATES * H]
    Value* hidden_after;        // the hidden states after the step [B, H]
    Value* others_after;        // the other states after the step [B, STATES * H]
    Value* output;              // the hidden states after the step once more [B, H], or null
};

template <bool RECURRENT>
__device__ __forceinline__ constexpr int gate_of(int sum) {
    return RECURRENT ? recurrent_gate(sum) : input_gate(sum);
}

// What one instruction loads of a row of the input weights or of the recurrent weights.
template <bool RECURRENT>
struct alignas((RECURRENT ? WIDTH : INPUT_WIDTH) * sizeof(Value)) Piece {
    static constexpr int SIZE = RECURRENT ? WIDTH : INPUT_WIDTH;
    Value at[SIZE];
};

// The pieces of the rows of all sums, for one place in the rows.
template <bool RECURRENT>
struct Pieces {
    Piece<RECURRENT> of_sum[SUMS];
};

// Loads the pieces of the unit's rows of a matrix [GATES * H, size] that begin at column k.
template <bool RECURRENT>
__device__ __forceinline__ void load_pieces(Pieces<RECURRENT>& pieces, const Value* matrix, int size, int k, int units) {
    if (k >= size) return;
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++)
        if (gate_of<RECURRENT>(sum) >= 0)
            pieces.of_sum[sum] = *(const Piece<RECURRENT>*)(matrix + ((i64)gate_of<RECURRENT>(sum) * units + blockIdx.x) * size + k);
}

// Adds a thread's part of the products of the unit's rows with vectors [B, size]. The first pieces have been loaded before.
// Sequences after the last one take its values.
template <bool RECURRENT>
__device__ __forceinline__ void add_products(
    Pieces<RECURRENT>& pieces, const Value* matrix, const Value* vectors, int size, const Single& p, Real (&sums)[SUMS][ROWS]) {
    constexpr int SIZE = Piece<RECURRENT>::SIZE;
#pragma unroll 1
    for (int k = threadIdx.x * SIZE; k < size; k += THREADS * SIZE) {
        Pieces<RECURRENT> later;
        load_pieces<RECURRENT>(later, matrix, size, k + THREADS * SIZE, p.units);
#pragma unroll
        for (int b = 0; b < ROWS; b++) {
            const auto own = *(const Piece<RECURRENT>*)(vectors + (i64)(b < p.batch ? b : p.batch - 1) * size + k);
#pragma unroll
            for (int sum = 0; sum < SUMS; sum++)
                if (gate_of<RECURRENT>(sum) >= 0)
#pragma unroll
                    for (int i = 0; i < SIZE; i++) sums[sum][b] += widened(pieces.of_sum[sum].at[i]) * widened(own.at[i]);
        }
        pieces = later;
    }
}

// Adds up the numbers of each sequence over the lanes of a warp. A lane receives the sum of sequence lane / (LANES / ROWS): at
// each distance, the lanes of each half give away the numbers of the other half's sequences.
__device__ __forceinline__ Real added_up(Real (&numbers)[ROWS]) {
    int distance = LANES / 2;
#pragma unroll
    for (int rows = ROWS / 2; rows > 0; rows /= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int b = 0; b < rows; b++) {
            const Real given = upper ? numbers[b] : numbers[b + rows];
            numbers[b] = (upper ? numbers[b + rows] : numbers[b]) + __shfl_xor_sync(EVERY_LANE, given, distance);
        }
        distance /= 2;
    }
#pragma unroll
    for (; distance > 0; distance /= 2) numbers[0] += __shfl_xor_sync(EVERY_LANE, numbers[0], distance);
    return numbers[0];
}

// Reads what the step of a sequence takes besides the products and the states: the biases and the parameters.
__device__ __forceinline__ void begin_step(Given& given, const Single& p) {
    const int unit = blockIdx.x;
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++) {
        given.sums[sum] = 0;
        if (p.input_bias && input_gate(sum) >= 0) given.sums[sum] += widened(p.input_bias[input_gate(sum) * p.units + unit]);
        if (p.recurrent_bias && recurrent_gate(sum) >= 0)
            given.sums[sum] += widened(p.recurrent_bias[recurrent_gate(sum) * p.units + unit]);
    }
#pragma unroll
    for (int i = 0; i < PARAMETERS; i++) given.parameters[i] = widened(p.parameters[i][unit]);
}

// The first pieces of a thread, which are loaded before it waits for anything.
struct First {
    Pieces<false> of_input;
    Pieces<true> of_hidden;
};

__device__ __forceinline__ void load_first(First& first, const Single& p) {
    if (!p.is_last) let_next_kernel_start();
    load_pieces<false>(first.of_input, p.input_weights, p.inputs, threadIdx.x * INPUT_WIDTH, p.units);
    load_pieces<true>(first.of_hidden, p.recurrent_weights, p.units, threadIdx.x * WIDTH, p.units);
}

// Computes the products of all sequences, and in thread b the step of sequence b. All threads of a block take part.
__device__ __forceinline__ void compute_step(
    First& first, Given (&given)[1], Returned (&returned)[1], const Value* hidden, const Single& p) {
    __shared__ Real products[WARPS * SUMS * ROWS];
    const int thread = threadIdx.x;
    wait_for_preceding_kernel();  // which writes the input
    Real sums[SUMS][ROWS] = {};
    add_products<false>(first.of_input, p.input_weights, p.x, p.inputs, p, sums);
    add_products<true>(first.of_hidden, p.recurrent_weights, hidden, p.units, p, sums);
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++) {
        const Real found = added_up(sums[sum]);
        const int lane = thread % LANES, each = LANES / ROWS;
        if (lane % each == 0) products[(thread / LANES * SUMS + sum) * ROWS + lane / each] = found;
    }
    __syncthreads();
    if (thread >= p.batch) return;
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++)
#pragma unroll
        for (int part = 0; part < WARPS; part++) given[0].sums[sum] += products[(part * SUMS + sum) * ROWS + thread];
    Real statistics[1][STATISTICS + 1];
    struct {
    } alone;  // the step combines no units
    step_of_row(given, returned, statistics, alone);
}

extern "C" __global__ void __launch_bounds__(THREADS) single_step(const Held p) {
    __shared__ u32 turn;
    const int thread = threadIdx.x, plane = p.of.batch * p.of.units, place = thread * p.of.units + blockIdx.x;
    // The count, the first weights and the states are all on their way before anything waits for one of them.
    u32 count = 0;
    if (thread == 0) count = atomicInc(p.begun, 2 * gridDim.x - 1);
    First first;
    load_first(first, p.of);
    Given given[1];
    if (thread < p.of.batch) {
        begin_step(given[0], p.of);
#pragma unroll
        for (int i = 0; i < CARRIED; i++) given[0].states[i] = p.carried[i * plane + place];
    }
    if (thread == 0) turn = count >= gridDim.x;
    __syncthreads();
    Returned returned[1];
    compute_step(first, given, returned, p.hidden + turn * plane, p.of);
    if (thread >= p.of.batch) return;
    const Value hidden = narrowed(returned[0].hidden);
    p.hidden[(1 - turn) * plane + place] = hidden;
    p.output[place] = hidden;
#pragma unroll
    for (int i = 0; i < CARRIED; i++) p.carried[i * plane + place] = i < STATES ? returned[0].states[i] : returned[0].hidden;
}

// The place of state i of a thread's sequence among the states of a call [B, STATES * H].
__device__ __forceinline__ int place_of_state(const Single& p, int i) {
    return (threadIdx.x * STATES + i) * p.units + blockIdx.x;
}

extern "C" __global__ void __launch_bounds__(THREADS) single_call(const Call p) {
    const int thread = threadIdx.x, place = thread * p.of.units + blockIdx.x;
    First first;
    load_first(first, p.of);
    Given given[1];
    if (thread < p.of.batch) {
        begin_step(given[0], p.of);
#pragma unroll
        for (int i = 0; i < CARRIED; i++)
            given[0].states[i] = widened(i < STATES ? p.others[place_of_state(p.of, i)] : p.hidden[place]);
    }
    Returned returned[1];
    compute_step(first, given, returned, p.hidden, p.of);
    if (thread >= p.of.batch) return;
    const Value hidden = narrowed(returned[0].hidden);
    p.hidden_after[place] = hidden;
    if (p.output) p.output[place] = hidden;
#pragma unroll
    for (int i = 0; i < STATES; i++) p.others_after[place_of_state(p.of, i)] = narrowed(returned[0].states[i]);
}

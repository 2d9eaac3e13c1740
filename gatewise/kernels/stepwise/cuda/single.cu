// A single time step of a layer for a few sequences: both products, the step of the cell, and the new states, in one launch.
//
// A block computes UNITS hidden units. Its threads read the units' rows of both weight matrices once, multiply them by the inputs
// and the hidden states of all sequences, and add up the products: without tensor cores for one unit (unit_products.cuh), with
// them for several (tile_products.cuh). A thread for each unit of a sequence then computes the step of the cell, whose code is
// generated (row_cell.cuh). ROWS is the number of sequences for which the source is compiled.
//
// `single_step` keeps the states where they are. Blocks store new hidden states while others still read the old ones, so there
// are two buffers, which steps read in turn. Blocks count themselves, modulo the number of blocks in two steps, and the count
// tells whose turn it is. So the arguments are the same in every step, and the replays of a CUDA graph carry the states. No
// block waits for another one. `single_call` reads the states before the step from one tensor and writes those after it to
// another one; in training it also keeps the sums, for single_backward.cu.
//
// From compute capability 9.0 on, the launch for a layer starts while the one for the layer below it still runs, and loads its
// first weights. The first layer's does not, because what runs before it may write weights or states.
#include "launch.cuh"
#include "row_cell.cuh"
#include "vectors.cuh"

constexpr int LANES = 32, THREADS = LANES * WARPS;
static_assert(STATISTICS == 0, "a block knows a few units");
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
    u32* begun;      // the number of blocks that have begun, modulo twice the blocks of a step
};

struct Call {
    Single of;
    const Value* hidden;        // the hidden states before the step [B, H]
    const Value* others;        // the other states before the step [B, STATES * H]
    Value* hidden_after;        // the hidden states after the step [B, H]
    Value* others_after;        // the other states after the step [B, STATES * H]
    Value* output;              // the hidden states after the step once more [B, H], or null
    Real* sums;                 // the sums of the step for a backward pass [B, SUMS * H], or null
};

template <bool RECURRENT>
__device__ __forceinline__ constexpr int gate_of(int sum) {
    return RECURRENT ? recurrent_gate(sum) : input_gate(sum);
}

#if UNITS == 1
#include "unit_products.cuh"
#else
#include "tile_products.cuh"
#endif

// The sequence and the unit whose step a thread computes, and whether there are such.
__device__ __forceinline__ int own_sequence() { return threadIdx.x / UNITS; }
__device__ __forceinline__ int own_unit() { return blockIdx.x * UNITS + threadIdx.x % UNITS; }
__device__ __forceinline__ bool has_step(const Single& p) { return own_sequence() < p.batch && own_unit() < p.units; }

// Reads what the step of a sequence takes besides the products and the states: the biases and the parameters.
__device__ __forceinline__ void begin_step(Given& given, const Single& p) {
    const int unit = own_unit();
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

// Computes the products of all sequences, and the step of the thread's unit and sequence; stores its sums [B, SUMS * H] unless
// `kept` is null. All threads of a block take part.
__device__ __forceinline__ void compute_step(
    First& first, Given (&given)[1], Returned (&returned)[1], const Value* hidden, Real* kept, const Single& p) {
    __shared__ Real products[WARPS * UNITS * SUMS * ROWS];
    wait_for_preceding_kernel();  // which writes the input
    multiply_rows(first, hidden, p, products);
    __syncthreads();
    if (!has_step(p)) return;
    const Real* own = products + threadIdx.x % UNITS * SUMS * ROWS + own_sequence();
#pragma unroll
    for (int sum = 0; sum < SUMS; sum++)
#pragma unroll
        for (int part = 0; part < WARPS; part++) given[0].sums[sum] += own[(part * UNITS * SUMS + sum) * ROWS];
    if (kept)
#pragma unroll
        for (int sum = 0; sum < SUMS; sum++)
            kept[(own_sequence() * SUMS + sum) * p.units + own_unit()] = given[0].sums[sum];
    Real statistics[1][STATISTICS + 1];
    struct {
    } alone;  // the step combines no units
    step_of_row(given, returned, statistics, alone);
}

extern "C" __global__ void __launch_bounds__(THREADS) single_step(const Held p) {
    __shared__ u32 turn;
    const int thread = threadIdx.x, plane = p.of.batch * p.of.units, place = own_sequence() * p.of.units + own_unit();
    // The count, the first weights and the states are all on their way before anything waits for one of them.
    u32 count = 0;
    if (thread == 0) count = atomicInc(p.begun, 2 * gridDim.x - 1);
    if (!p.of.is_last) let_next_kernel_start();
    First first;
    load_first(first, p.of);
    Given given[1];
    if (has_step(p.of)) {
        begin_step(given[0], p.of);
#pragma unroll
        for (int i = 0; i < CARRIED; i++) given[0].states[i] = p.carried[i * plane + place];
    }
    if (thread == 0) turn = count >= gridDim.x;
    __syncthreads();
    Returned returned[1];
    compute_step(first, given, returned, p.hidden + turn * plane, nullptr, p.of);
    if (!has_step(p.of)) return;
    const Value hidden = narrowed(returned[0].hidden);
    p.hidden[(1 - turn) * plane + place] = hidden;
    p.output[place] = hidden;
#pragma unroll
    for (int i = 0; i < CARRIED; i++) p.carried[i * plane + place] = i < STATES ? returned[0].states[i] : returned[0].hidden;
}

// The place of state i of a thread's unit and sequence among the states of a call [B, STATES * H].
__device__ __forceinline__ int place_of_state(const Single& p, int i) {
    return (own_sequence() * STATES + i) * p.units + own_unit();
}

extern "C" __global__ void __launch_bounds__(THREADS) single_call(const Call p) {
    const int place = own_sequence() * p.of.units + own_unit();
    if (!p.of.is_last) let_next_kernel_start();
    First first;
    load_first(first, p.of);
    Given given[1];
    if (has_step(p.of)) {
        begin_step(given[0], p.of);
#pragma unroll
        for (int i = 0; i < CARRIED; i++)
            given[0].states[i] = widened(i < STATES ? p.others[place_of_state(p.of, i)] : p.hidden[place]);
    }
    Returned returned[1];
    compute_step(first, given, returned, p.hidden, p.sums, p.of);
    if (!has_step(p.of)) return;
    const Value hidden = narrowed(returned[0].hidden);
    p.hidden_after[place] = hidden;
    if (p.output) p.output[place] = hidden;
#pragma unroll
    for (int i = 0; i < STATES; i++) p.others_after[place_of_state(p.of, i)] = narrowed(returned[0].states[i]);
}

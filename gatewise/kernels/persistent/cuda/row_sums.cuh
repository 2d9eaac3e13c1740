// The gate sums of a unit in the passes of any cell, which may have more than four, and their places in tensors.
//
// Tensors have four columns of H values. Without APART, column k belongs to sum k. A cell with more sums (APART) adds the
// recurrent product of some gates to a sum of its own. It has two tensors: column k of the first one belongs to the sum with
// the input product of gate k, and column k of the second one to the sum with the recurrent product of gate k.
#pragma once
#define FAST_ACTIVATIONS 1  // calls of functions would take registers that hold weights
#include "row_cell.cuh"

struct Kept {
    float x, y, z, w;
};

#include "gates.cuh"

constexpr bool APART = SUMS > 4;
static_assert(GATES <= 4, "a column for each gate");

// Whether column k of the recurrent product takes the rows of gate k, for all four columns.
constexpr bool SUMS_ARE_GATES = GATES == 4 && (APART || (recurrent_gate(0) == 0 && recurrent_gate(1) == 1 && recurrent_gate(2) == 2 && recurrent_gate(3) == 3));

// The gate whose rows of the recurrent weights a column of the product takes; -1 if it takes none.
__device__ __forceinline__ int gate_of(int column, bool) { return APART ? column < GATES ? column : -1 : recurrent_gate(column); }

// The columns of a sum: that of its input product, or -1, and that of its recurrent product, or -1.
__device__ __forceinline__ constexpr int input_column(int sum) { return input_gate(sum); }
__device__ __forceinline__ constexpr int recurrent_column(int sum) { return recurrent_gate(sum) < 0 ? -1 : APART ? recurrent_gate(sum) : sum; }

// The tensor and the column in which a sum and its gradient are stored.
__device__ __forceinline__ constexpr bool in_second_tensor(int sum) { return APART && input_gate(sum) < 0; }
__device__ __forceinline__ constexpr int stored_column(int sum) { return in_second_tensor(sum) ? recurrent_gate(sum) : sum; }

__device__ __forceinline__ float& element(Kept& four, int column) { return column == 0 ? four.x : column == 1 ? four.y : column == 2 ? four.z : four.w; }
__device__ __forceinline__ float element(const float4& four, int column) { return column == 0 ? four.x : column == 1 ? four.y : column == 2 ? four.z : four.w; }

// The bias of a gate sum of a unit, from both bias vectors [GATES * SIZE], or 0 if they are null.
__device__ __forceinline__ float bias_of(const Value* bias_ih, const Value* bias_hh, int sum, int unit) {
    const int input = input_gate(sum), recurrent = recurrent_gate(sum);
    if (!bias_ih || unit >= SIZE) return 0.f;
    return (input < 0 ? 0.f : widened(bias_ih[input * SIZE + unit])) + (recurrent < 0 ? 0.f : widened(bias_hh[recurrent * SIZE + unit]));
}

// The values of sums, or their gradients, as they are stored in the two tensors.
struct Stored {
    Kept first, second;
};

__device__ __forceinline__ Stored stored(const Real (&sums)[SUMS]) {
    Stored found = {{0.f, 0.f, 0.f, 0.f}, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
        if (!in_second_tensor(sum)) element(found.first, stored_column(sum)) = sums[sum];
        // The second tensor has every sum with a recurrent product, because a product of matrices reads their gradients.
        if (APART && recurrent_gate(sum) >= 0) element(found.second, recurrent_gate(sum)) = sums[sum];
    }
    return found;
}

__device__ __forceinline__ void load_stored(Real (&sums)[SUMS], Stored found) {
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) sums[sum] = element(in_second_tensor(sum) ? found.second : found.first, stored_column(sum));
}

// The step of a cell and its adjoint for all hidden units of batch rows. The macro CELL_CODE contains their code, which
// gatewise/derivation/row.py generates from the definition of the cell.
#pragma once
#include "activations.cuh"
#include "functions.cuh"

__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return 1 / sqrt(x); }

#include "moments.cuh"

CELL_CODE

// The step of a cell and its adjoint for one hidden unit. The macro CELL_CODE contains their code, which
// gatewise/derivation/device.py generates from the definition of the cell.
#pragma once
#include "activations.cuh"
#include "functions.cuh"
CELL_CODE
static_assert(SUMS <= 4, "the generated code supports at most four gate sums");

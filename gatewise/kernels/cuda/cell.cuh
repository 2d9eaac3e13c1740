// The step of the cell and its adjoint on one hidden unit, in the numbers of numbers.cuh. CELL_CODE is made of the cell's
// statement (gatewise/derivation/device.py).
#pragma once
#include "numbers.cuh"
#include "functions.cuh"
CELL_CODE
static_assert(SUMS <= 4, "the code of a cell has vectors of four");

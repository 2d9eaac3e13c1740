"""Decide, by a problem alone, the dtype of the gradients of weights, and whether a backward pass can leave factors."""

from __future__ import annotations

import torch

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.step import has_fused_passes


def gradients_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype in which a backward pass computes the gradients of weights."""
    wide = problem.float32_gradients and problem.element_bytes == 2 and deep_products.widens()
    if not wide or problem.rebuilds_gates or not has_fused_passes(problem.cell):
        return problem.dtype
    return torch.float32


def factor_widths(problem: Problem) -> tuple[int, ...]:
    """Return the widths of the factors of one layer that a backward pass can leave, padded; empty if it cannot.

    They are those of x, the gradients of the gate sums of each direction, and the hidden states that the steps of each
    direction read.
    """
    # Other schedules add up products of segments, or fold the projection; other cells have gradients in two tensors.
    one_product = not (problem.rebuilds_gates or problem.proj_size or problem.traced)
    fits = one_product and problem.num_layers == 1 and has_fused_passes(problem.cell)
    wanted = torch.float32 if problem.float32_gradients else problem.dtype
    if not fits or problem.element_bytes != 2 or gradients_dtype(problem) != wanted:
        return ()
    hidden, directions = hidden_of(problem.hidden_size), problem.num_directions
    return hidden_of(problem.input_size), *(4 * hidden,) * directions, *(hidden,) * directions

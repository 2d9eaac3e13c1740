"""Decide, by the sizes of a problem, whether float32 matrix products round to TF32, as cuDNN does for `nn.LSTM`."""

from __future__ import annotations

import torch

from gatewise.contract.problem import Problem

_UNROUNDED_HIDDEN = 192  # the largest size of cuDNN's own persistent kernel, which never rounds to TF32
# With cuDNN 9.19 and 256 hidden units, products of 16 rows are exact, and those of 32 rows are rounded to TF32.
_SMALL_HIDDEN, _SMALL_BATCH = 256, 31


def rounds_to_tf32(problem: Problem) -> bool:
    """Whether the kernel rounds float32 factors to TF32."""
    return problem.dtype == torch.float32 and not exact_products(problem)


def exact_products(problem: Problem) -> bool:
    """Whether matrix products must be as exact as float32's own instead of rounded to TF32.

    Where TF32 is allowed, cuDNN still multiplies a single row, and steps through small sizes, without rounding.
    """
    if problem.dtype != torch.float32:
        return False
    small = problem.hidden_size <= _SMALL_HIDDEN and problem.batch <= _SMALL_BATCH
    return not problem.allow_tf32 or problem.batch == 1 or problem.hidden_size <= _UNROUNDED_HIDDEN or small

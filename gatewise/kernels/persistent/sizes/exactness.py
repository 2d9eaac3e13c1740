"""How closely float32 products must follow float32: as closely as nn.LSTM's under the same settings."""

from __future__ import annotations

import torch

from gatewise.contract.problem import Problem

_UNROUNDED_HIDDEN = 192  # the largest that cuDNN's own persistent kernel for small sizes takes, which never rounds
# cuDNN 9.19's products of 16 rows at 256 units are exact, those of 32 are rounded.
_SMALL_HIDDEN, _SMALL_BATCH = 256, 31


def rounds_to_tf32(problem: Problem) -> bool:
    """Whether the kernel rounds float32 operands to TF32."""
    return problem.dtype == torch.float32 and not exact_products(problem)


def exact_products(problem: Problem) -> bool:
    """Whether float32 products must be exact to float32 instead of rounded to TF32.

    Where TF32 is allowed, cuDNN still multiplies a single row, and steps through small sizes, without rounding.
    """
    if problem.dtype != torch.float32:
        return False
    small = problem.hidden_size <= _SMALL_HIDDEN and problem.batch <= _SMALL_BATCH
    return not problem.allow_tf32 or problem.batch == 1 or problem.hidden_size <= _UNROUNDED_HIDDEN or small

"""The criteria of the kernel `stepwise`."""

from __future__ import annotations

import torch

from gatewise.contract.criterion import Criterion
from gatewise.kernels.criteria import AMPERE, COMPILER, FUSES, NOT_EMPTY, NOT_LEAN, NOT_PROJECTED, RESETS_TO_ZERO
from gatewise.kernels.cuda import formats

CRITERIA = (
    COMPILER,
    AMPERE,
    Criterion(
        "dtype",
        allowed=formats.names(formats.NUMBERS),
        actual=lambda problem, device: formats.names([problem.dtype]),
        holds=lambda problem, device: problem.dtype in formats.NUMBERS,
        violation=lambda problem, device: (problem.replace(dtype=torch.float8_e5m2), device),
    ),
    FUSES,
    NOT_EMPTY,
    NOT_PROJECTED,
    RESETS_TO_ZERO,
    NOT_LEAN,
)

"""The criteria of the kernel `stepwise`."""

from __future__ import annotations

import torch

from gatewise.contract.criterion import Criterion
from gatewise.kernels.criteria import AMPERE, COMPILER, FUSES, NO_RESETS, NOT_EMPTY, NOT_LEAN, NOT_PROJECTED

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


CRITERIA = (
    COMPILER,
    AMPERE,
    Criterion(
        "dtype",
        allowed="bfloat16, float16, float32, float64",
        actual=lambda problem, device: str(problem.dtype).removeprefix("torch."),
        holds=lambda problem, device: problem.dtype in _DTYPES,
        violation=lambda problem, device: (problem.replace(dtype=torch.float8_e5m2), device),
    ),
    FUSES,
    NOT_EMPTY,
    NOT_PROJECTED,
    NO_RESETS,
    NOT_LEAN,
)

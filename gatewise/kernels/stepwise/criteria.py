"""The criteria of the kernel `stepwise`."""

from __future__ import annotations

import torch

from gatewise.contract.criterion import Criterion
from gatewise.kernels.criteria import AMPERE, COMPILER, FUSES, NOT_EMPTY, NOT_LEAN, NOT_PROJECTED
from gatewise.kernels.cuda import formats

# The passes compute resets, and their sources compiled for the CPU agree with the oracle. Once
# tests/kernels/stepwise/test_resets_on_gpu.py has passed on a GPU, this criterion need only refuse resets of cells with
# `initial_states`, because the passes reset states to zero.
RESETS_NOT_COMPARED = Criterion(
    "resets",
    allowed="none, until results on a GPU have been compared with float64",
    actual=lambda problem, device: "given" if problem.resets else "none",
    holds=lambda problem, device: not problem.resets,
    violation=lambda problem, device: (problem.replace(resets=True), device),
    advice="the kernel `eager` computes them",
)

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
    RESETS_NOT_COMPARED,
    NOT_LEAN,
)

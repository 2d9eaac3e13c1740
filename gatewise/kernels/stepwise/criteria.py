"""The criteria of the kernel `stepwise`."""

from __future__ import annotations

import torch

from gatewise.cells import PeepholeLSTM
from gatewise.contract.criterion import Criterion
from gatewise.kernels.criteria import (
    AMPERE,
    COMPILER,
    NOT_EMPTY,
    NOT_LEAN,
    NOT_PROJECTED,
    RESETS_TO_INITIAL,
    SEVERAL_UNITS,
    TRACES,
    is_fused,
)
from gatewise.kernels.cuda import formats
from gatewise.kernels.stepwise.product_layout import MOST_UNITS_OF_ROW

ROW_FITS = Criterion(
    "hidden_size",
    allowed=f"at most {MOST_UNITS_OF_ROW} for a cell that is computed a row at a time",
    actual=lambda problem, device: f"{problem.hidden_size} with {problem.cell.name}",
    holds=lambda problem, device: problem.hidden_size <= MOST_UNITS_OF_ROW or is_fused(problem.cell),
    violation=lambda problem, device: (
        problem.replace(cell=PeepholeLSTM(), proj_size=0, hidden_size=MOST_UNITS_OF_ROW + 1),
        device,
    ),
)

ROW_NOT_PROJECTED = Criterion(
    "proj_size",
    allowed="0 for a cell that is computed a row at a time",
    actual=lambda problem, device: f"{problem.proj_size} with {problem.cell.name}",
    holds=lambda problem, device: problem.proj_size == 0 or is_fused(problem.cell),
    violation=lambda problem, device: (
        problem.replace(cell=PeepholeLSTM(), proj_size=1, hidden_size=max(2, problem.hidden_size)),
        device,
    ),
)

HAS_FORMAT = Criterion(
    "dtype",
    allowed=formats.names(formats.NUMBERS),
    actual=lambda problem, device: formats.names([problem.dtype]),
    holds=lambda problem, device: problem.dtype in formats.NUMBERS,
    violation=lambda problem, device: (problem.replace(dtype=torch.float8_e5m2), device),
)

CRITERIA = (
    COMPILER,
    AMPERE,
    HAS_FORMAT,
    TRACES,
    SEVERAL_UNITS,
    ROW_FITS,
    ROW_NOT_PROJECTED,
    NOT_EMPTY,
    NOT_PROJECTED,
    RESETS_TO_INITIAL,
    NOT_LEAN,
)

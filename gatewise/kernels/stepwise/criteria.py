"""The criteria of the kernel `stepwise`."""

from __future__ import annotations

import torch

from gatewise.cells import Cell, PeepholeLSTM
from gatewise.contract.criterion import Criterion
from gatewise.kernels.criteria import (
    AMPERE,
    COMPILER,
    NOT_EMPTY,
    NOT_LEAN,
    NOT_PROJECTED,
    RESETS_TO_ZERO,
    TRACES,
    is_fused,
)
from gatewise.kernels.cuda import formats
from gatewise.kernels.stepwise.product_layout import MOST_UNITS_OF_ROW


def _resets(cell: Cell) -> bool:
    """Return whether the passes reset the states of a cell to their initial values."""
    begins = [cell.initial_value(name) for name in ("h", *cell.states)]
    # At a reset, the recurrent product of the hidden state is left out.
    return begins[0] == 0 and (not any(begins) or not is_fused(cell))


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

RESETS_TO_INITIAL = Criterion(
    "resets",
    allowed="none for a cell whose hidden state does not begin at zero, or whose units are computed one by one and any"
    " state does not",
    actual=lambda problem, device: f"given for {problem.cell.name}" if problem.resets else "none",
    holds=lambda problem, device: not problem.resets or _resets(problem.cell),
    violation=RESETS_TO_ZERO.violation,
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
    TRACES,
    ROW_FITS,
    ROW_NOT_PROJECTED,
    NOT_EMPTY,
    NOT_PROJECTED,
    RESETS_TO_INITIAL,
    NOT_LEAN,
)

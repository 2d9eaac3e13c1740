"""The criteria of the kernel `stepwise`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from gatewise.cells import Cell, PeepholeLSTM
from gatewise.contract.criterion import Criterion
from gatewise.kernels.criteria import (
    AMPERE,
    COMPILER,
    NOT_EMPTY,
    NOT_LEAN,
    NOT_PROJECTED,
    TRACES,
    is_fused,
)
from gatewise.kernels.cuda import formats
from gatewise.kernels.stepwise.product_layout import MOST_UNITS_OF_ROW


class _BeginsAtOne(Cell):
    """A cell whose states begin at one, for the violation of `RESETS_TO_ZERO`."""

    name = "a cell with initial states"
    gates = ("a",)
    initial_states: ClassVar[Mapping[str, float]] = {"h": 1.0}

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        return torch.tanh(gate.a), {}


RESETS_TO_ZERO = Criterion(
    "resets",
    allowed="none for a cell with `initial_states`, because the passes reset states to zero",
    actual=lambda problem, device: f"given for {problem.cell.name}" if problem.resets else "none",
    holds=lambda problem, device: not (problem.resets and problem.cell.initial_states),
    violation=lambda problem, device: (problem.replace(cell=_BeginsAtOne(), proj_size=0, resets=True), device),
    advice="the kernel `eager` computes them",
)

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
    RESETS_TO_ZERO,
    NOT_LEAN,
)

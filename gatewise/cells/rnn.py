"""The Elman cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.cell import Cell
from gatewise.cells.options import check_choice

_FUNCTIONS = {"tanh": torch.tanh, "relu": torch.relu}


class RNN(Cell):
    """The cell of `torch.nn.RNN`, without gates.

        h' = tanh(W_ih x + b_ih + W_hh h + b_hh)        (or relu)

    Args:
        nonlinearity: "tanh" or "relu".

    Raises:
        ValueError: The nonlinearity is another one.

    Source: Elman, "Finding structure in time" (1990).
    """

    gates = ("z",)

    def __init__(self, nonlinearity: str = "tanh") -> None:
        check_choice("nonlinearity", nonlinearity, _FUNCTIONS)
        self.nonlinearity = nonlinearity

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - it depends on an option
        """The name of the cell, with its nonlinearity."""
        return f"rnn_{self.nonlinearity}"

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state after a step."""
        return _FUNCTIONS[self.nonlinearity](gate.z), {}

    def __repr__(self) -> str:
        return f"RNN({self.nonlinearity!r})"

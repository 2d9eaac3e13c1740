"""The shapes and the cells that are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gatewise.benchmarks.cases import LSTM_GRID, LSTMCase
from gatewise.cells import SHIPPED, Cell
from gatewise.contract.errors import ArgumentError, sentence

WHOLE_TIME = 32
"""The number of steps of the case in which the whole loop is compiled; compiling longer loops takes minutes."""


class OwnLSTM(Cell):
    """The LSTM as a user of the library would state it, who does not know `gatewise.cells.LSTM`."""

    name = "own_lstm"
    gates = ("input", "forget", "candidate", "output")
    states = ("c",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state and the cell state after a step."""
        c = torch.sigmoid(gate.forget) * state.c + torch.sigmoid(gate.input) * torch.tanh(gate.candidate)
        return torch.sigmoid(gate.output) * torch.tanh(c), {"c": c}


def measured_cells() -> tuple[Cell, ...]:
    """Return the cells of the library, and the one that is stated here."""
    return (*SHIPPED, OwnLSTM())


CASES = (
    *(
        case
        for case in LSTM_GRID
        if case.num_layers == case.directions == 1 and case.hidden_size <= 1024 and not case.ragged
    ),
    LSTMCase(f"{WHOLE_TIME}-64-512", WHOLE_TIME, 64, 512),
)

QUICK = tuple(case for case in CASES if case.name in ("100-16-256", "50-128-512", "decode_64_512"))

# Small enough for a CPU and for tests: all code runs, but the times mean nothing.
TINY = (LSTMCase("tiny", 6, 3, 8), LSTMCase("tiny_decode", 1, 2, 8))


def chosen_cells(names: Sequence[str]) -> tuple[Cell, ...]:
    """Return the cells with the given names; without names all of them.

    Raises:
        ArgumentError: A name is unknown.
    """
    known = {cell.name: cell for cell in measured_cells()}
    for name in names:
        if name not in known:
            raise ArgumentError(sentence("--cell", f"one of {', '.join(known)}", repr(name)))
    return tuple(cell for name, cell in known.items() if not names or name in names)

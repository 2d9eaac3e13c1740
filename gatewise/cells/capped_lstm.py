"""The LSTM cell with a capped input gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell


class CappedLSTM(Cell):
    """An LSTM whose input gate is at most one minus its forget gate, so that the cell state stays within [-1, 1].

        f, o = sigmoid(z_f), sigmoid(z_o);   g = tanh(z_g)
        i = min(sigmoid(z_i), 1 - f)
        c' = f * c + i * g
        h' = o * tanh(c')

    with the sums z = W_ih x + b_ih + W_hh h + b_hh of the gates in the order i f g o.

    Source: Melis et al., "On the state of the art of evaluation in neural language models" (2018), `cap_input_gate`.
    """

    name = "capped_lstm"
    gates = ("i", "f", "g", "o")
    states = ("c",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state and the cell state after a step."""
        f = torch.sigmoid(gate.f)
        i = torch.minimum(torch.sigmoid(gate.i), 1 - f)
        c = f * state.c + i * candidate(torch.tanh(gate.g))
        return torch.sigmoid(gate.o) * torch.tanh(c), {"c": c}

"""The LSTM cell with coupled input and forget gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell


class CoupledLSTM(Cell):
    """An LSTM whose input gate is one minus its forget gate (CIFG), with three gates instead of four.

        f, o = sigmoid(z_f), sigmoid(z_o);   g = tanh(z_g)
        c' = f * c + (1 - f) * g
        h' = o * tanh(c')

    with the sums z = W_ih x + b_ih + W_hh h + b_hh of the gates in the order f g o.

    Source: Greff et al., "LSTM: a search space odyssey" (2017), the variant CIFG.
    """

    name = "coupled_lstm"
    gates = ("f", "g", "o")
    states = ("c",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state and the cell state after a step."""
        g = candidate(torch.tanh(gate.g))
        c = g + torch.sigmoid(gate.f) * (state.c - g)
        return torch.sigmoid(gate.o) * torch.tanh(c), {"c": c}

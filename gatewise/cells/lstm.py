"""The LSTM cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell


class LSTM(Cell):
    """The long short-term memory cell of `torch.nn.LSTM`.

        i, f, o = sigmoid(z_i), sigmoid(z_f), sigmoid(z_o);   g = tanh(z_g)
        c' = f * c + i * g
        h' = o * tanh(c')                           (with a projection: W_hr h')

    where z are the sums W_ih x + b_ih + W_hh h + b_hh of the gates. The order of the gates is i f g o.

    Source: Hochreiter & Schmidhuber, "Long short-term memory" (1997), with the forget gate of Gers et al. (2000) and
    the projection of Sak et al. (2014).
    """

    name = "lstm"
    gates = ("i", "f", "g", "o")
    states = ("c",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state and the cell state after a step."""
        c = torch.sigmoid(gate.f) * state.c + torch.sigmoid(gate.i) * candidate(torch.tanh(gate.g))
        return torch.sigmoid(gate.o) * torch.tanh(c), {"c": c}

"""The LSTM cell with peephole connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell, Initial


class PeepholeLSTM(Cell):
    """An LSTM whose gates also read the cell state, each unit's gates that of the same unit.

        i = sigmoid(z_i + p_i * c)
        f = sigmoid(z_f + p_f * c)
        c' = f * c + i * tanh(z_g)
        o = sigmoid(z_o + p_o * c')
        h' = o * tanh(c')

    with the sums z = W_ih x + b_ih + W_hh h + b_hh of the gates in the order i f g o, and the learned peepholes p_i,
    p_f and p_o. The input and forget gates read the cell state before the step, the output gate reads the one after
    it. Peepholes are zero initially, so that the cell starts as an LSTM.

    Source: Gers & Schmidhuber, "Recurrent nets that time and count" (2000); Gers, Schraudolph & Schmidhuber, "Learning
    precise timing with LSTM recurrent networks" (2002).
    """

    name = "peephole_lstm"
    gates = ("i", "f", "g", "o")
    states = ("c",)
    parameters: ClassVar[Mapping[str, Initial]] = {"p_i": 0.0, "p_f": 0.0, "p_o": 0.0}

    def step(self, gate: Any, state: Any, parameter: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state and the cell state after a step."""
        i = torch.sigmoid(gate.i + parameter.p_i * state.c)
        f = torch.sigmoid(gate.f + parameter.p_f * state.c)
        c = f * state.c + i * candidate(torch.tanh(gate.g))
        return torch.sigmoid(gate.o + parameter.p_o * c) * torch.tanh(c), {"c": c}

"""The minimal gated unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell


class MGU(Cell):
    """The minimal gated unit, a GRU with a single gate, in the form that applies the gate after the recurrent product.

        f = sigmoid(z_f)
        n = tanh(W_in x + b_in + f * (W_hn h + b_hn))
        h' = (1 - f) * h + f * n

    where z_f is the sum W_ih x + b_ih + W_hh h + b_hh of the gate f. The order of the gates is f n.

    The paper has n = tanh(W_in x + W_hn (f * h) + b_n): there the gate is applied before the recurrent product, which
    is a different function, as it is for the GRU of Cho et al. (2014) and that of cuDNN. Weights that were trained in
    the form of the paper do not fit this cell.

    Source: Zhou et al., "Minimal gated unit for recurrent neural networks" (2016).
    """

    name = "mgu"
    gates = ("f", "n")
    apart = ("n",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state after a step."""
        f = torch.sigmoid(gate.f)
        n = candidate(torch.tanh(gate.n.input + f * gate.n.recurrent))
        return state.h + f * (n - state.h), {}

"""The GRU cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell


class GRU(Cell):
    """The gated recurrent unit of `torch.nn.GRU`.

        r, z = sigmoid(z_r), sigmoid(z_z)
        n = tanh(W_in x + b_in + r * (W_hn h + b_hn))
        h' = (1 - z) * n + z * h

    where z_r and z_z are the sums W_ih x + b_ih + W_hh h + b_hh of the gates r and z. The order of the gates is r z n.
    As in cuDNN, the reset gate r is applied after the recurrent product (`reset_after=True` in Keras).

    Source: Cho et al., "Learning phrase representations using RNN encoder-decoder for statistical machine translation"
    (2014), in cuDNN's variant.
    """

    name = "gru"
    gates = ("r", "z", "n")
    apart = ("n",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state after a step."""
        r, z = torch.sigmoid(gate.r), torch.sigmoid(gate.z)
        n = candidate(torch.tanh(gate.n.input + r * gate.n.recurrent))
        return n + z * (state.h - n), {}

"""The GRU cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.cell import Cell


class GRU(Cell):
    """The gated recurrent unit of `torch.nn.GRU`.

        r, z = sigmoid(z_r), sigmoid(z_z)
        n = tanh(W_in x + b_in + r * (W_hn h + b_hn))
        h' = (1 - z) * n + z * h

    with the sums z = W_ih x + b_ih + W_hh h + b_hh of the gates r and z; the gates stand in the order r z n. As in
    cuDNN, the reset gate r is applied after the recurrent product (Keras calls this `reset_after=True`).

    Source: Cho et al., "Learning phrase representations using RNN encoder-decoder for statistical machine translation"
    (2014), in the form of cuDNN.
    """

    name = "gru"
    gates = ("r", "z", "n")
    apart = ("n",)

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state after a step."""
        r, z = torch.sigmoid(gate.r), torch.sigmoid(gate.z)
        n = torch.tanh(gate.n.input + r * gate.n.recurrent)
        return n + z * (state.h - n), {}

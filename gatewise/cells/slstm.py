"""The sLSTM cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gatewise.cells.cell import Cell


class SLSTM(Cell):
    """The sLSTM of xLSTM: exponential input gate, a normaliser state n and a stabiliser state m.

        z, o = tanh(z_z), sigmoid(z_o);   m' = max(log sigmoid(z_f) + m, z_i)
        i, f = exp(z_i - m'), exp(log sigmoid(z_f) + m - m')
        c' = f * c + i * z;   n' = f * n + i
        h' = o * c' / n'

    with the sums of the gates in the order i f z o. Without the stabiliser, which cancels in h', the gates are exp(z_i)
    and sigmoid(z_f). The first step needs the states 0: n' is then i, which is positive.

    Source: Beck et al., "xLSTM: extended long short-term memory" (2024), section 2.2, with a sigmoid forget gate.
    """

    name = "slstm"
    gates = ("i", "f", "z", "o")
    states = ("c", "n", "m")

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state, and the cell, normaliser and stabiliser states after a step."""
        # log sigmoid(f) without an overflow: the smaller of f and 0, less log(1 + exp(-|f|)).
        log_f = torch.minimum(gate.f, 0 * gate.f) - torch.log(1 + torch.exp(-torch.maximum(gate.f, -gate.f)))
        kept = log_f + state.m
        m = torch.maximum(kept, gate.i)
        i, f = torch.exp(gate.i - m), torch.exp(kept - m)
        c = f * state.c + i * torch.tanh(gate.z)
        n = f * state.n + i
        return torch.sigmoid(gate.o) * c / n, {"c": c, "n": n, "m": m}

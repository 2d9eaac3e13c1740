"""The sLSTM cell of xLSTM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from gatewise.cells.candidate import candidate
from gatewise.cells.cell import Cell


class SLSTM(Cell):
    """The sLSTM of xLSTM: an exponential input gate, a normaliser state n and a stabiliser state m.

        m' = max(log(sigmoid(z_f)) + m, z_i)
        i = exp(z_i - m')
        f = exp(log(sigmoid(z_f)) + m - m')
        c' = f * c + i * tanh(z_z)
        n' = f * n + i
        h' = sigmoid(z_o) * c' / n'

    with the sums z = W_ih x + b_ih + W_hh h + b_hh of the gates in the order i f z o. The states are h, c, n and m, and
    the recurrent matrix is dense: a matrix in blocks (heads) is one with zeros outside of them.

    The stabiliser keeps the exponentials in range and cancels in h. The published code starts with zeros and takes
    m' = z_i in the first step, while n is zero. Here m starts at minus infinity, which gives the same numbers: f is
    then zero. An initial state that is given for n must not be negative.

    Source: Beck et al., "xLSTM: extended long short-term memory" (2024), section 2.2 and appendix A.2, with the sigmoid
    forget gate of its code.
    """

    name = "slstm"
    gates = ("i", "f", "z", "o")
    states = ("c", "n", "m")
    initial_states: ClassVar[Mapping[str, float]] = {"m": -math.inf}

    def step(self, gate: Any, state: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return the hidden state and the other states after a step."""
        earlier = torch.nn.functional.logsigmoid(gate.f) + state.m
        m = torch.maximum(earlier, gate.i)
        i, f = torch.exp(gate.i - m), torch.exp(earlier - m)
        c = f * state.c + i * candidate(torch.tanh(gate.z))
        n = f * state.n + i
        return torch.sigmoid(gate.o) * c / n, {"c": c, "n": n, "m": m}

"""Cells for tests: those of the library, and others that together use every supported operation and feature."""

from typing import ClassVar

import torch

from gatewise.cells.cell import Cell
from gatewise.cells.gru import GRU
from gatewise.cells.lstm import LSTM
from gatewise.cells.peephole_lstm import PeepholeLSTM


class Capped(Cell):
    """An LSTM whose input gate is at most 1 - f."""

    gates = ("i", "f", "g", "o")
    states = ("c",)

    def step(self, gate, state):
        f = torch.sigmoid(gate.f)
        c = f * state.c + torch.minimum(torch.sigmoid(gate.i), 1 - f) * torch.tanh(gate.g)
        return torch.sigmoid(gate.o) * torch.tanh(c), {"c": c}


class Exponential(Cell):
    """The sLSTM of xLSTM: exponential gates, with a normalizer state and a stabilizer state besides the cell state."""

    gates = ("i", "f", "g", "o")
    states = ("c", "n", "m")

    def step(self, gate, state):
        log_f = torch.log(torch.sigmoid(gate.f))
        m = torch.maximum(log_f + state.m, gate.i)
        i, f = torch.exp(gate.i - m), torch.exp(log_f + state.m - m)
        c, n = f * state.c + i * torch.tanh(gate.g), f * state.n + i
        return torch.sigmoid(gate.o) * c / torch.clamp(n, min=1.0, max=8.0), {"c": c, "n": n, "m": m}


class Leaky(Cell):
    """A cell that reads the hidden state, reads a separate sum twice, and returns a state unchanged."""

    gates = ("a", "g")
    states = ("first",)
    apart = ("a",)

    def step(self, gate, state):
        a = torch.sigmoid(gate.a.input - 0.5 * gate.a.recurrent) + torch.relu(torch.tanh(gate.a.recurrent)) / 4
        h = a * state.h + (1 - a) * torch.sqrt(torch.sigmoid(-gate.g)) + 0.1 * state.first
        return h, {"first": state.first}


class Learned(Cell):
    """A cell with learned parameters, some of which are coefficients of the adjoint by themselves."""

    gates = ("a",)
    states = ("slow",)
    parameters: ClassVar = {"rate": 0.5, "gain": 1.5}

    def step(self, gate, state, parameter):
        keep = torch.sigmoid(parameter.rate)
        slow = keep * keep * state.slow + (1 - keep) * torch.tanh(gate.a)
        return parameter.gain * parameter.gain * slow + parameter.rate, {"slow": slow}


LIBRARY = [LSTM(), GRU()]
ALL = [*LIBRARY, PeepholeLSTM(), Capped(), Exponential(), Leaky(), Learned()]


def name(cell):
    return type(cell).__name__

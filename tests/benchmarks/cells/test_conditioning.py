"""The values of calls determine their results: float32 agrees with float64 in outputs and gradients of long calls."""

import pytest
import torch

from gatewise.benchmarks.cases import LSTMCase
from gatewise.benchmarks.cells import call as calls
from gatewise.benchmarks.cells.loop import CellLoop, loop_of, step_of
from gatewise.cells import LayerNormGRU, LayerNormLSTM
from tests.pairwise import exhaustive

CASE = LSTMCase("long", 300, 1, 256)


def distances(cell):
    call = calls.draw(cell, CASE, torch.device("cpu"))

    def results(dtype):
        loop = CellLoop(cell, call.weights, dtype, loop_of(cell, step_of(cell)))
        x, *states = (value.to(dtype).requires_grad_() for value in (call.x, *call.states))
        y, after = loop(x, tuple(states))
        above = [gradient.to(dtype) for gradient in (call.dy, *call.dstates)]
        return [y.detach(), *torch.autograd.grad((y, *after), (x, *states), above)]

    both = zip(results(torch.float32), results(torch.float64), strict=True)
    return [float((found - exact).norm() / exact.norm()) for found, exact in both]


@pytest.mark.parametrize("cell", [*exhaustive(LayerNormLSTM()), LayerNormGRU()], ids=lambda cell: cell.name)
def test_long_calls_are_well_conditioned(cell):
    assert max(distances(cell)) < 1e-5


# It says why the gains are smaller, and fails when they need not be.
@pytest.mark.exhaustive
def test_gains_of_one_would_make_the_states_chaotic(monkeypatch):
    monkeypatch.setattr(calls, "_GAIN", 1.0)
    # By how much depends on the processor, and on PyTorch.
    assert max(distances(LayerNormLSTM())) > 2e-5

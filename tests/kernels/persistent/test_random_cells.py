"""Random cells that fused kernels accept, with emulated launches, compared with autograd through a loop."""

import pytest
import torch

from gatewise.cells import Cell
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent.kernel import persistent
from tests.derivation.random_cells import seeded
from tests.kernels import cell_code
from tests.kernels.agreement import assert_agrees
from tests.kernels.persistent import emulation

TOGETHER = 20

PROBLEMS = [
    Problem(4, 3, 3, 5),
    Problem(4, 3, 3, 5, bidirectional=True, layout=Layout.HOST_LENGTHS),
    Problem(3, 2, 1, 4, num_layers=2, bias=False),
    Problem(4, 2, 3, 5, layout=Layout.PACKED, lean=True),
]


@pytest.mark.parametrize("chunk", [0, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(1, 10))])
def test_agrees_with_autograd(chunk, monkeypatch):
    emulation.emulate(monkeypatch)
    cells = seeded(range(chunk * TOGETHER, (chunk + 1) * TOGETHER), fused=True)
    compiled = dict(zip(cells, cell_code.codes_of(cells), strict=True))
    monkeypatch.setattr(emulation, "code_of", compiled.__getitem__)
    for number, cell in enumerate(cells):
        problem = PROBLEMS[number % len(PROBLEMS)].replace(cell=cell, dtype=torch.float64, needs_grad=True)
        # Blocks add up gradients of biases in float32.
        assert_agrees(persistent, problem, lambda name: 1e-6 if "bias" in name else 1e-10)


class Running(Cell):
    """A running sum of a linear layer: all derivatives of its step are 0 or 1, so that none is stored."""

    gates = ("a",)
    states = ("c",)

    def step(self, gate, state):
        c = state.c + gate.a
        return c, {"c": c}


def test_a_linear_cell_agrees_with_autograd(monkeypatch):
    emulation.emulate(monkeypatch)
    problem = PROBLEMS[0].replace(cell=Running(), dtype=torch.float64, needs_grad=True)
    assert_agrees(persistent, problem, lambda name: 1e-6 if "bias" in name else 1e-10)

"""The values that fused kernels keep, and the two-stage adjoint in compiled code, compared with autograd."""

import pytest
import torch

from gatewise.cells import GRU, LSTM, Cell
from gatewise.cells.step import next_states
from gatewise.derivation.device import device_code
from gatewise.derivation.fused import carried_states, kept_values
from gatewise.derivation.trace import traced
from gatewise.derivation.unit import unit_of
from tests.kernels.cell_code import FUSED, codes_of

UNITS = 5


class Interpolated(Cell):
    """A cell with two sums whose carried state is the hidden state."""

    name = "interpolated"
    gates = ("a", "g")

    def step(self, gate, state):
        a = torch.sigmoid(gate.a)
        return a * state.h + (1 - a) * torch.tanh(gate.g), {}


class Clipped(Cell):
    """A cell with a comparison, numbers and a division, which reads a sum twice."""

    name = "clipped"
    gates = ("i", "f", "g", "o")
    states = ("c",)

    def step(self, gate, state):
        f = torch.sigmoid(gate.f)
        i = torch.minimum(torch.sigmoid(gate.i), 1 - f)
        c = torch.clamp(f * state.c + i * torch.tanh(gate.g) / 1.5, -2, 2)
        return torch.sigmoid(gate.o - 0.25 * gate.f) * torch.tanh(c), {"c": c}


class Simple(Cell):
    """A cell with one sum, as `torch.nn.RNN` has with relu."""

    name = "simple"
    gates = ("z",)

    def step(self, gate, state):
        return torch.relu(gate.z), {}


class Looking(Cell):
    """A cell whose gate reads the state before its activation."""

    name = "looking"
    gates = ("a", "g")
    states = ("c",)

    def step(self, gate, state):
        a = torch.sigmoid(gate.a + state.c / 2)
        c = a * state.c + (1 - a) * torch.tanh(gate.g)
        return torch.tanh(c), {"c": c}


OWN = [Interpolated(), Clipped(), Simple(), Looking()]
CELLS = [*FUSED, *OWN]


@pytest.fixture(scope="module")
def codes():
    return dict(zip(CELLS, codes_of(CELLS), strict=True))


def test_activations_are_kept_instead_of_sums():
    assert [operation.function for operation in traced(LSTM()).operations if operation.name in kept_values(LSTM())] == [
        "sigmoid",
        "sigmoid",
        "tanh",
        "sigmoid",
    ]
    assert kept_values(GRU())[3] == "n_recurrent"  # a product with r reads it before any activation
    assert kept_values(Clipped())[1] == "f"  # two operations read it
    assert kept_values(Looking())[0] == "a"  # its activation cannot be computed again from the sums alone
    assert kept_values(Simple()) == ("z",)  # the derivative of relu needs the sign of the sum


def test_carried_states():
    assert [carried_states(cell) for cell in (LSTM(), GRU(), *OWN)] == [("c",), ("h",), ("h",), ("c",), ("h",), ("c",)]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_code_agrees_with_autograd(cell, codes):
    torch.manual_seed(0)
    names, (carried,) = cell.sums, carried_states(cell)
    sums = torch.randn(4, UNITS, dtype=torch.float64)
    before = torch.randn(UNITS, dtype=torch.float64)
    kept, state, hidden = codes[cell].stepped(sums, before)
    leaves = [own.clone().requires_grad_() for own in (*sums[: len(names)], before)]
    h, others = next_states(cell, dict(zip(names, leaves, strict=False)), {"h": before, carried: leaves[-1]})
    after = others[0] if others else h
    assert torch.allclose(hidden, h, rtol=1e-14)
    assert torch.allclose(state, after, rtol=1e-14)
    dh, d = torch.randn(2, UNITS, dtype=torch.float64)
    total = (h * dh).sum() + (after * d).sum()
    expected = torch.autograd.grad(total, leaves, materialize_grads=True)
    dsums, dbefore = codes[cell].adjoint(kept, state, before, dh, d)
    for found, own in zip((*dsums[: len(names)], dbefore), expected, strict=True):
        assert torch.allclose(found, own, rtol=1e-12, atol=1e-14)
    assert not dsums[len(names) :].any()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_pytorch_functions_agree_with_the_code(cell, codes):
    torch.manual_seed(0)
    names, unit = len(cell.sums), unit_of(cell)
    sums, before = torch.randn(4, UNITS, dtype=torch.float64), torch.randn(UNITS, dtype=torch.float64)
    expected = codes[cell].stepped(sums, before)
    kept, state, hidden = unit.stepped(*sums[:names], before)
    for found, own in zip((*kept, state, hidden), (*expected[0][:names], *expected[1:]), strict=True):
        assert torch.allclose(found, own, rtol=1e-14)
    dh, d = torch.randn(2, UNITS, dtype=torch.float64)
    dsums, dbefore = unit.adjoint(*kept, state, before, dh, d)
    found, expected_d = codes[cell].adjoint(expected[0], state, before, dh, d)
    for mine, own in zip((*dsums, dbefore), (*found[:names], expected_d), strict=True):
        assert torch.allclose(mine, own, rtol=1e-12, atol=1e-14)


def test_different_code_has_different_keys():
    keys = {device_code(cell).key for cell in FUSED}
    assert len(keys) == len(FUSED)
    assert device_code(LSTM()).key == device_code(LSTM()).key

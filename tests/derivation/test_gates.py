"""The step function with operators for each gate, compared with the cell's own step."""

import pytest
import torch
from hypothesis import given

from gatewise.cells import Cell
from gatewise.cells.slstm import SLSTM
from gatewise.derivation.gates import source_of, step_by_gates
from gatewise.derivation.trace import is_pointwise
from tests.derivation.random_cells import cell_of, sources
from tests.derivation.statements import ALL, name
from tests.derivation.test_step import BATCH, HIDDEN, drawn, stated
from tests.kernels.test_random_cells import few

POINTWISE = [*filter(is_pointwise, (*ALL, SLSTM()))]
each_cell = pytest.mark.parametrize("cell", POINTWISE, ids=name)


def arguments(cell):
    """Return the first arguments of the step, its states, its parameters, and the sums that they amount to."""
    count = len(cell.gates)
    first = [drawn(BATCH, count * HIDDEN).requires_grad_() for _ in range(1 + bool(cell.apart))]
    states = [drawn(BATCH, HIDDEN).requires_grad_() for _ in ("h", *cell.states)]
    parameters = [drawn(HIDDEN).requires_grad_() for _ in cell.parameters]
    own, *other = [value.chunk(count, -1) for value in first]
    if not other:
        return first, states, parameters, first[0]
    each = list(zip(cell.gates, own, other[0], strict=True))
    sums = [one if gate in cell.apart else one + another for gate, one, another in each]
    sums += [another for gate, _, another in each if gate in cell.apart]
    return first, states, parameters, torch.cat(sums, -1)


def check(cell):
    first, states, parameters, sums = arguments(cell)
    leaves = [*first, *states, *parameters]
    expected = stated(cell, sums, states, parameters)
    found = step_by_gates(cell, False)(*leaves)
    above = [drawn(BATCH, HIDDEN) for _ in expected]
    gradients = torch.autograd.grad(expected, leaves, above, materialize_grads=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(torch.autograd.grad(found, leaves, above, materialize_grads=True), gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
    kept = [value.detach().clone() for value in (*states, *parameters)]
    with torch.no_grad():
        # Sums that are views with other strides, as those of one step of a batch are.
        wide = [torch.cat([value, value], -1)[:, : value.shape[1]] for value in first]
        found = step_by_gates(cell, True)(*wide, *states, *parameters)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs.detach())
    for value, before in zip((*states, *parameters), kept, strict=True):
        assert torch.equal(value, before)


@each_cell
def test_both_forms_agree_with_the_definition(cell):
    torch.manual_seed(0)
    check(cell)


@few
@given(sources())
def test_both_forms_agree_with_the_definition_of_random_cells(source):
    torch.manual_seed(0)
    cell = cell_of(source)
    if is_pointwise(cell):
        check(cell)


@each_cell
def test_nothing_is_overwritten_for_autograd(cell):
    assert "_(" not in source_of(cell, False)
    assert "out=" not in source_of(cell, False)


class Twice(Cell):
    """A cell that reads a product twice in one operation, and large numbers."""

    gates = ("a", "b")

    def step(self, gate, state):
        product = torch.sigmoid(gate.a) * torch.tanh(gate.b)
        return torch.clamp(product + product - (product - product), min=-1e30, max=3.0 * 2**60), {}


def test_a_product_that_one_operation_reads_twice():
    check(Twice())


def test_the_logarithm_of_a_sigmoid_is_one_operator():
    source = source_of(SLSTM(), True)
    assert "logsigmoid(sum_f)" in source
    assert "log_" not in source

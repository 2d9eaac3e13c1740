"""The gradients of statistics as the solution of triangular equations, compared with autograd in float64."""

import random

import pytest
import torch

from gatewise.cells import SLSTM, Cell, LayerNormGRU, LayerNormLSTM, standardized
from gatewise.cells.layer_norm_lstm import FORMS
from gatewise.derivation.fused import carried_states
from gatewise.derivation.jacobian import is_solved, totals_of
from gatewise.derivation.levels import averaged
from gatewise.derivation.row import combinations_of_adjoint, row_code
from gatewise.derivation.trace import MEAN, STATISTICS, before, is_number, learned, traced
from tests.derivation.random_cells import cell_of, drawn
from tests.derivation.test_random_cells import normal, stated
from tests.kernels.cell_code import ROW_UNITS, row_codes

UNITS = 7


class Nested(Cell):
    """A cell whose normalizations depend on each other, of sums, of states, of parameters and without a mean."""

    gates = ("a", "b")
    apart = ("b",)
    states = ("m", "n")
    parameters = {"gain": 1.0, "rate": 0.5}  # noqa: RUF012 - a declaration

    def step(self, gate, state, parameter):
        a, m = standardized(gate.a, state.m)
        m = standardized(a * torch.sigmoid(gate.b.input) + m, eps=1e-2, centered=False)
        n = standardized(torch.tanh(m) * parameter.gain + gate.b.recurrent + standardized(state.n))
        together = standardized(n, m * state.h, gate.a)
        rate = standardized(parameter.rate)
        return together[0] * together[1] + rate * n, {"m": m + together[2], "n": n}


class Chain(Cell):
    """A cell with normalizations of normalizations, which need more derivatives than an exchange takes."""

    gates = ("a",)

    def step(self, gate, state):
        value = gate.a
        for _ in range(9):
            value = standardized(torch.tanh(value) * state.h)
        return value, {}


def named(cell):
    return getattr(cell, "name", None) or type(cell).__name__


PUBLISHED = [LayerNormLSTM.of(form) for form in FORMS]
DEEP = [LayerNormLSTM(hidden=True), LayerNormLSTM.of("tensorflow1", hidden=True), Nested()]
DRAWN = [cell for cell in (cell_of(drawn(random.Random(seed))) for seed in range(150)) if is_solved(cell)]


def statistic(operation, values):
    """Return a mean, or 1 / sqrt(variance + eps) with the mean computed again, as a function of the values alone."""
    joined = torch.cat([values[str(name)].expand(UNITS) for name in averaged(operation)])
    if operation.function == MEAN:
        return joined.mean()
    eps, mean = operation.operands[:2]
    distance = joined - (mean if is_number(mean) else joined.mean())
    return (distance.square().mean() + eps).rsqrt()


def evaluated(cell, given, replaced):
    """Return all values of a step by name; `replaced` makes the tensor that is used in place of a statistic."""
    values = dict(given)
    for operation in traced(cell).operations:
        if operation.function in STATISTICS:
            values[operation.name] = replaced(operation, statistic(operation, values))
        else:
            operands = [one if is_number(one) else values[str(one)] for one in operation.operands]
            values[operation.name] = _FUNCTIONS.get(operation.function, _of_torch(operation.function))(*operands)
    return values


def _of_torch(name):
    return lambda *operands: getattr(torch, name)(*map(torch.as_tensor, operands))


_FUNCTIONS = {
    "clamp_min": lambda value, limit: torch.clamp(value, min=limit),
    "clamp_max": lambda value, limit: torch.clamp(value, max=limit),
}


def loss_of(cell, values, above):
    step = traced(cell)
    results = (values[step.hidden], *(values[name] for name in step.after))
    return sum((result * own).sum() for result, own in zip(results, above, strict=True))


def gradients(value, leaves):
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize("cell", [*PUBLISHED, *DEEP, Chain(), LayerNormGRU(), *DRAWN[:20]], ids=named)
def test_the_solution_is_what_autograd_computes(cell):
    generator = torch.Generator().manual_seed(1)
    step = traced(cell)
    names = [*step.sums, *map(before, ("h", *step.states)), *map(learned, cell.parameters)]
    given = {name: normal(generator, UNITS) for name in names}
    above = normal(generator, 1 + len(step.states), UNITS)

    disturbed = {}

    def with_disturbance(operation, value):
        disturbed[operation.name] = torch.zeros_like(value).requires_grad_()
        return value + disturbed[operation.name]

    expected = gradients(loss_of(cell, evaluated(cell, given, with_disturbance), above), list(disturbed.values()))
    expected = dict(zip(disturbed, expected, strict=True))

    leaves = {}

    def as_leaf(operation, value):
        leaves[operation.name] = value.detach().requires_grad_()
        return leaves[operation.name]

    values = evaluated(cell, given, as_leaf)
    partial = dict(zip(leaves, gradients(loss_of(cell, values, above), list(leaves.values())), strict=True))
    derivatives = {
        own.name: dict(zip(leaves, gradients(statistic(own, values), list(leaves.values())), strict=True))
        for own in step.statistics
    }
    structure = totals_of(cell)
    for name, own in partial.items():
        assert name in structure.partial or not own
    for later, row in derivatives.items():
        for earlier, own in row.items():
            assert (later, earlier) in structure.entries or not own or later not in structure.total
    total = {}
    for name in structure.total:
        total[name] = partial[name] + sum(
            total[later] * derivatives[later][earlier] for later, earlier in structure.entries if earlier == name
        )
    for name, own in expected.items():
        torch.testing.assert_close(total.get(name, torch.zeros_like(own)), own, rtol=1e-9, atol=1e-11)


def test_the_generated_code_agrees_with_autograd():
    cells, generator = [*PUBLISHED, *DEEP], torch.Generator().manual_seed(2)
    for cell, code in zip(cells, row_codes(cells, solved=True), strict=True):
        read = len(cell.sums) + len(carried_states(cell)) + len(cell.parameters)
        values, above = normal(generator, read, ROW_UNITS), normal(generator, 1 + len(cell.states), ROW_UNITS)
        _, found = code(values, above)
        torch.testing.assert_close(found, stated(cell, values, above)[1], rtol=1e-9, atol=1e-11)


def test_units_are_combined_in_one_place_where_levels_need_several():
    for cell in (*PUBLISHED, *DEEP):
        by_level = combinations_of_adjoint(cell).places
        solved = combinations_of_adjoint(cell, solved=True)
        assert is_solved(cell) == (by_level > 1)
        assert solved.places == 1
        called = row_code(cell, solved=True).text.split("adjoint_of_row", 1)[1].count("row.template")
        assert called == 1
    assert combinations_of_adjoint(LayerNormLSTM()) == (2, 2)
    # Two means and two deviations of gates, those of c', and the derivatives of the latter by the former.
    assert totals_of(LayerNormLSTM()).pairs == 3 + 4
    assert combinations_of_adjoint(LayerNormLSTM(), solved=True) == (1, 7)


@pytest.mark.parametrize("cell", [SLSTM(), LayerNormGRU(), LayerNormLSTM.of("lingvo"), Chain()], ids=named)
def test_other_cells_combine_units_level_by_level(cell):
    assert not is_solved(cell)
    assert row_code(cell, solved=True).text == row_code(cell).text
    assert "JACOBIAN = 0" in row_code(cell).text


def test_the_forms_of_the_code_have_keys_of_their_own():
    assert row_code(LayerNormLSTM(), solved=True).key != row_code(LayerNormLSTM()).key
    assert row_code(LayerNormGRU(), solved=True).key == row_code(LayerNormGRU()).key


def test_a_statistic_that_no_result_reads_takes_no_part():
    class Unread(Cell):
        gates = ("a", "b")

        def step(self, gate, state):
            standardized(torch.tanh(standardized(gate.a)))
            return torch.tanh(standardized(standardized(gate.b) * state.h)), {}

    structure = totals_of(Unread())
    assert len(traced(Unread()).statistics) == 8
    assert len(structure.total) == 4
    assert structure.partial == structure.total[::-1]
    generator = torch.Generator().manual_seed(3)
    values, above = normal(generator, 3, ROW_UNITS), normal(generator, 1, ROW_UNITS)
    (code,) = row_codes([Unread()], solved=True)
    torch.testing.assert_close(code(values, above)[1], stated(Unread(), values, above)[1], rtol=1e-9, atol=1e-11)

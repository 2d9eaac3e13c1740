"""Both passes of cells that are computed a row at a time, on the CPU: the CUDA kernels compiled as C++."""

import dataclasses
from typing import ClassVar

import pytest
import torch

from gatewise import testing
from gatewise.cells import (
    GRU,
    LSTM,
    SLSTM,
    Cell,
    LayerNormGRU,
    LayerNormLSTM,
    PeepholeLSTM,
    Regularised,
    standardized,
)
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.derivation.row import row_code
from gatewise.kernels.stepwise.product_layout import ProductLayout
from tests.kernels.cell_code import ROWS
from tests.kernels.stepwise.test_passes_on_cpu import SIMPLER, Unrefused
from tests.pairwise import each_value, exhaustive_unless, pairwise


class TwoLevels(Cell):
    """A cell whose second state and hidden state are normalized, and which reads h."""

    gates = ("a", "b")
    states = ("m", "n")
    parameters: ClassVar = {"p": 0.5}

    def step(self, gate, state, parameter):
        m, n = state.m * torch.sigmoid(gate.a), torch.tanh(state.n + parameter.p * state.h + gate.b)
        n, m = standardized(n + m, m - n, eps=0.1)
        h = standardized(torch.exp(-m * m) + n * state.h, eps=0.1, centered=False)
        return h, {"m": m, "n": n + h}


class BeginsElsewhere(Cell):
    """A cell with two states that begin at other numbers than zero."""

    gates = ("a", "b")
    states = ("m", "n")
    initial_states: ClassVar = {"m": 0.5, "n": -1.0}

    def step(self, gate, state):
        m, n = state.m * torch.sigmoid(gate.a) + gate.b, torch.tanh(state.n + gate.b)
        return torch.tanh(m) * n, {"m": m, "n": n}


MASKED = [
    Regularised(GRU(), 0.4),
    Regularised(LSTM(), 0.3, (0.2, 0.1), 0.25),
    Regularised(LayerNormGRU(), 0.3, (0.2,)),
    Regularised(LayerNormLSTM(), candidate_dropout=0.4),
]
ENCODER = Problem(5, 3, 4, 7, num_layers=2, bidirectional=True, resets=True)
RAGGED = Problem(7, 4, 3, 5, bidirectional=True, layout=Layout.HOST_LENGTHS)
CELLS = [*ROWS, TwoLevels(), LayerNormGRU(gates="apart"), LayerNormGRU(centered=False), LayerNormLSTM(hidden=True)]
PLAIN = [case for case in testing.CASES if not case.shape.proj_size and case.name != "long"]
# Every size and cell is compiled by itself, so that other sizes than the usual one are tested with one cell.
PAIRS = [
    (case, cell)
    for case, cell in pairwise(PLAIN, CELLS)
    if case.shape.hidden_size == 31 or cell == LayerNormLSTM(hidden=True)
]
USUAL = each_value([(case, cell) for case, cell in PAIRS if case.name not in SIMPLER], most=6)
OTHERS = [pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in PAIRS if pair[0].name in SIMPLER]
MASKED_CASES = [*zip([ENCODER, RAGGED] * 2, MASKED, strict=True)]
TURNED = ProductLayout(transposed_forward=True, transposed_backward=True)


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize(("case", "cell"), [*USUAL, *OTHERS], ids=lambda own: getattr(own, "name", None))
def test_agrees_with_the_oracle(case, cell, on_cpu):
    parts = len(cell.gates)
    on_cpu(TURNED if case.shape.bidirectional else dataclasses.replace(TURNED, split_k=parts))
    problem = case.problem(dtype=torch.float64).replace(cell=cell)
    testing.check_kernel(Unrefused(), problem, "cpu")


def assert_agrees(problem, on_cpu, layout):
    on_cpu(layout)
    testing.check_kernel(Unrefused(), problem.replace(dtype=torch.float64, needs_grad=True), "cpu")


@pytest.mark.usefixtures("budgets_once")
@pytest.mark.parametrize(("shape", "cell"), exhaustive_unless(MASKED_CASES[1:2], MASKED_CASES), ids=str)
def test_masks_agree_with_the_oracle(cell, shape, on_cpu):
    assert_agrees(shape.replace(cell=cell), on_cpu, dataclasses.replace(TURNED, split_k=len(cell.gates)))


@pytest.mark.parametrize(("shape", "cell"), [(ENCODER, SLSTM()), (RAGGED, BeginsElsewhere())], ids=str)
def test_resets_to_initial_values_agree_with_the_oracle(cell, shape, on_cpu):
    assert_agrees(shape.replace(cell=cell, resets=True), on_cpu, ProductLayout())


def test_nan_does_not_pass_a_reset_to_initial_values(on_cpu):
    on_cpu(ProductLayout())
    problem = Problem(8, 2, 4, 7, dtype=torch.float64, needs_grad=True, resets=True, cell=SLSTM())
    resets = torch.zeros(8, 2, dtype=torch.bool)
    resets[3, 1] = True
    inputs = testing.make_inputs(problem)._replace(resets=resets)
    gradients = testing.make_gradients(problem, inputs)
    inputs.x[1, 1, 0] = torch.nan
    result, found = testing.run_kernel(Unrefused(), problem, inputs, gradients, Needs(weights=False))
    assert result.y[1:3, 1].isnan().all()
    assert not result.y[3:].isnan().any()
    assert not found.x[3:].isnan().any()
    assert not result.c_n.isnan().any()


def test_cells_with_other_initial_values_are_compiled_separately():
    other = BeginsElsewhere()
    other.initial_states = {"m": 0.25, "n": -1.0}
    assert row_code(other).key != row_code(BeginsElsewhere()).key
    assert row_code(Regularised(LSTM(), 0.3)).key == row_code(Regularised(LSTM(), 0.2)).key  # the rate is an argument


@pytest.mark.parametrize("form", ["lingvo", pytest.param("returnn_joined", marks=pytest.mark.exhaustive)])
def test_published_forms_agree_with_the_oracle(form, on_cpu):
    on_cpu(ProductLayout())
    cell = LayerNormLSTM.of(form)
    problem = Problem(5, 3, 4, 7, bidirectional=True, bias=False, dtype=torch.float64, needs_grad=True, cell=cell)
    testing.check_kernel(Unrefused(), problem, "cpu")


@pytest.mark.parametrize("cell", [LayerNormLSTM(), PeepholeLSTM(), LayerNormGRU()], ids=lambda cell: cell.name)
def test_nan_stays_in_its_sequence(cell, on_cpu):
    on_cpu(ProductLayout())
    problem = Problem(6, 3, 4, 31, dtype=torch.float64, layout=Layout.DENSE, cell=cell)
    inputs = testing.make_inputs(problem)
    inputs.x[2, 1, 0] = torch.nan
    y, h_n, c_n, _ = testing.run_kernel(Unrefused(), problem, inputs)[0]
    assert y[2:, 1].isnan().all()
    assert not y[:2].isnan().any()
    assert not y[:, [0, 2]].isnan().any()
    assert h_n[0, 1].isnan().all()
    assert not c_n[0, [0, 2]].isnan().any()

"""The generated functions of one step, compared with the cell's definition, PyTorch's cells and autograd."""

import pytest
import torch

from gatewise.cells.gru import GRU
from gatewise.cells.lstm import LSTM
from gatewise.cells.step import next_states
from gatewise.derivation.adjoint import adjoint_of
from gatewise.derivation.pointwise import coefficient_function, pointwise_of
from gatewise.derivation.trace import traced
from gatewise.kernels.eager.unroll import state_dtype
from tests.derivation.statements import ALL, name

BATCH, INPUT, HIDDEN = 3, 5, 7

each_cell = pytest.mark.parametrize("cell", ALL, ids=name)


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def arguments(cell, *leading):
    """Return random sums, states before a step with the hidden state first, and parameters."""
    sums = drawn(*leading, BATCH, len(cell.sums) * HIDDEN).requires_grad_()
    states = [drawn(*leading, BATCH, HIDDEN).requires_grad_() for _ in ("h", *cell.states)]
    return sums, states, [drawn(HIDDEN).requires_grad_() for _ in cell.parameters]


def stated(cell, sums, states, parameters):
    """Call the cell's own `step` with tensors."""
    by_name = dict(zip(cell.sums, sums.chunk(len(cell.sums), -1), strict=True))
    own = dict(zip(cell.parameters, parameters, strict=True))
    h, after = next_states(cell, by_name, dict(zip(("h", *cell.states), states, strict=True)), own)
    return h, *after


@each_cell
def test_the_step_function_agrees_with_the_definition(cell):
    sums, states, parameters = arguments(cell)
    found = pointwise_of(cell).step(sums, *states, *parameters)
    for mine, theirs in zip(found, stated(cell, sums, states, parameters), strict=True):
        torch.testing.assert_close(mine, theirs)


@each_cell
def test_the_hidden_state_is_recomputed_from_the_states_after_the_step(cell):
    sums, states, parameters = arguments(cell, 4)
    h, *after = stated(cell, sums, states, parameters)
    torch.testing.assert_close(pointwise_of(cell).hidden(sums, *states, *after, *parameters), h)


@each_cell
def test_the_adjoint_is_the_derivative_of_the_step(cell):
    sums, states, parameters = arguments(cell, 4)
    outputs = stated(cell, sums, states, parameters)
    above = [drawn(*output.shape) for output in outputs]
    expected = torch.autograd.grad(outputs, (sums, *states, *parameters), above, materialize_grads=True)
    of_sums, of_hidden, *others = expected
    of_states, of_parameters = others[: len(cell.states)], others[len(cell.states) :]
    step = traced(cell)
    rows = [*of_sums.chunk(len(cell.sums), -1), *of_states, *([of_hidden] if step.reads_hidden else [])]
    shape = 4, BATCH, len(rows) + len(parameters), HIDDEN
    columns = [torch.full(shape, torch.nan, dtype=torch.float64) for _ in outputs]
    with torch.no_grad():
        coefficient_function(cell)(sums, *states, *outputs[1:], *parameters, columns)
    found = sum(given.unsqueeze(-2) * column for given, column in zip(above, columns, strict=True))
    assert len(adjoint_of(cell).rows) == len(rows) + len(parameters)
    found = list(found.unbind(-2))
    found[len(rows) :] = [rows_of_one.sum((0, 1)) for rows_of_one in found[len(rows) :]]
    for mine, theirs in zip(found, [*rows, *of_parameters], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_lstm_step_agrees_with_pytorchs_lstm_cell():
    cell = torch.nn.LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    x, h, c = drawn(BATCH, INPUT), drawn(BATCH, HIDDEN), drawn(BATCH, HIDDEN)
    sums = x @ cell.weight_ih.T + h @ cell.weight_hh.T + cell.bias_ih + cell.bias_hh
    for mine, theirs in zip(pointwise_of(LSTM()).step(sums, h, c), cell(x, (h, c)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_gru_step_agrees_with_pytorchs_gru_cell():
    cell = torch.nn.GRUCell(INPUT, HIDDEN, dtype=torch.float64)
    x, h = drawn(BATCH, INPUT), drawn(BATCH, HIDDEN)
    of_input, of_hidden = x @ cell.weight_ih.T + cell.bias_ih, h @ cell.weight_hh.T + cell.bias_hh
    both = of_input[:, : 2 * HIDDEN] + of_hidden[:, : 2 * HIDDEN]
    sums = torch.cat([both, of_input[:, 2 * HIDDEN :], of_hidden[:, 2 * HIDDEN :]], -1)
    (found,) = pointwise_of(GRU()).step(sums, h)
    torch.testing.assert_close(found, cell(x, h))


def test_the_adjoint_of_the_lstm_is_the_one_of_the_literature():
    adjoint = adjoint_of(LSTM())
    assert (adjoint.rows, adjoint.columns) == (("i", "f", "g", "o", "c_before"), ("h", "c"))
    operations = sum(int(expression.count_ops()) for _, expression in adjoint.shared)
    operations += sum(int(entry.count_ops()) for row in adjoint.table for entry in row)
    assert operations <= 24
    assert not any(entry.has(function) for row in adjoint.table for entry in row for function in ("tanh", "sigmoid"))


@pytest.mark.parametrize("cell", [LSTM()], ids=name)
def test_the_adjoint_is_finite_where_gates_saturate(cell):
    sums = torch.tensor([-1e4, 1e4, 1e4, -1e4], dtype=torch.float64).repeat_interleave(HIDDEN).expand(2, -1)
    h, c0 = drawn(2, HIDDEN), drawn(2, HIDDEN) * 1e3
    _, c = pointwise_of(cell).step(sums, h, c0)
    columns = [torch.empty(2, 5, HIDDEN, dtype=torch.float64) for _ in range(2)]
    coefficient_function(cell)(sums, h, c0, c, columns)
    torch.testing.assert_close(c, c0)
    torch.testing.assert_close(columns[1][:, 4], torch.ones_like(c))
    assert columns[0][:, :4].count_nonzero() == columns[1][:, :4].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_small_increments_of_a_cell_state_in_16_bits_are_not_lost(dtype):
    # With f = 1, c grows by i * g = 1/512 per step. At c = 1 the last bit of the 16-bit types is 1/1024 and 1/128.
    increment = torch.atanh(torch.tensor(1 / 512))
    sums = torch.tensor([40.0, 40.0, increment.item(), 0.0]).repeat_interleave(HIDDEN).expand(BATCH, -1).to(dtype)
    h = c = torch.ones(BATCH, HIDDEN, dtype=state_dtype(dtype))
    step = pointwise_of(LSTM()).step
    for _ in range(512):
        _, c = step(sums.to(c.dtype), h, c)
    exact = 1 + 512 * torch.tanh(sums[0, 2 * HIDDEN].double()).item()
    torch.testing.assert_close(c, torch.full_like(c, exact), rtol=1e-5, atol=0)

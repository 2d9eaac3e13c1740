"""One step of the cell: against torch's, and its adjoint against autograd."""

import pytest
import torch

from gatewise.cells import lstm

BATCH, INPUT, HIDDEN = 3, 5, 7


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_step_is_torchs_cell():
    cell = torch.nn.LSTMCell(INPUT, HIDDEN, dtype=torch.float64)
    x, h, c = drawn(BATCH, INPUT), drawn(BATCH, HIDDEN), drawn(BATCH, HIDDEN)
    z = x @ cell.weight_ih.T + h @ cell.weight_hh.T + cell.bias_ih + cell.bias_hh
    for mine, theirs in zip(lstm.step(z, c), cell(x, (h, c)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_adjoint_is_the_derivative_of_the_step():
    z, c0 = drawn(BATCH, 4 * HIDDEN).requires_grad_(), drawn(BATCH, HIDDEN).requires_grad_()
    m, c = lstm.step(z, c0)
    dm, dc = drawn(BATCH, HIDDEN), drawn(BATCH, HIDDEN)
    dz, dc0 = torch.autograd.grad((m, c), (z, c0), (dm, dc))
    with torch.no_grad():
        rows = lstm.adjoint(dm, dc, lstm.coefficients(z, c0, c))
    torch.testing.assert_close(rows[:, : lstm.CELL].flatten(1), dz)
    torch.testing.assert_close(rows[:, lstm.CELL], dc0)


def test_adjoint_is_finite_where_gates_saturate():
    z = torch.tensor([[-1e4, 1e4, 1e4, -1e4]], dtype=torch.float64).repeat(2, HIDDEN).view(2, HIDDEN, 4)
    z = z.transpose(1, 2).reshape(2, 4 * HIDDEN)
    c0 = drawn(2, HIDDEN) * 1e3
    m, c = lstm.step(z, c0)
    rows = lstm.adjoint(torch.ones_like(m), torch.ones_like(c), lstm.coefficients(z, c0, c))
    torch.testing.assert_close(c, c0)
    torch.testing.assert_close(rows[:, lstm.CELL], torch.ones_like(c))
    assert rows[:, : lstm.CELL].count_nonzero() == 0


def test_hidden_is_what_the_step_gave():
    z, c0 = drawn(4, BATCH, 4 * HIDDEN), drawn(4, BATCH, HIDDEN)
    m, c = lstm.step(z, c0)
    torch.testing.assert_close(lstm.hidden(z, c), m)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_small_increments_of_a_half_cell_state_are_not_lost(dtype):
    # f = 1 and i * g = 1/512 a step: at c = 1 the half types' last bits are 1/1024 and 1/128.
    increment = torch.atanh(torch.tensor(1 / 512))
    z = torch.tensor([40.0, 40.0, increment.item(), 0.0]).repeat_interleave(HIDDEN).expand(BATCH, -1).to(dtype)
    c = torch.ones(BATCH, HIDDEN, dtype=lstm.state_dtype(dtype))
    for _ in range(512):
        _, c = lstm.step(z, c)
    exact = 1 + 512 * torch.tanh(z[0, 2 * HIDDEN].double()).item()
    torch.testing.assert_close(c, torch.full_like(c, exact), rtol=1e-5, atol=0)

"""The Triton programs that add up gradients of rows, in Triton's interpreter where there is no GPU, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gatewise import for_data_parallel
from gatewise.models import lookup, table_gradient
from gatewise.models.lookup import looked_up
from tests.compilers import device_of_programs

pytestmark = pytest.mark.parametrize("device", [device_of_programs()])


def numbers(count, rows, kind):
    generator = torch.Generator().manual_seed(count)
    if kind == "equal":
        return torch.full((count,), rows - 1)
    if kind == "different":
        return torch.randperm(rows, generator=generator)[:count]
    return (rows ** torch.rand(count, generator=generator, dtype=torch.float64)).long() - 1  # as frequent as words


def expected(gradient, tokens, rows):
    return torch.zeros(rows, gradient.shape[-1], dtype=torch.float64).index_add_(0, tokens, gradient.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("count", "rows", "width", "kind"),
    [(1, 1, 1, "equal"), (7, 9, 3, "words"), (40, 50, 257, "different"), (70, 30, 300, "words"), (35, 5, 20, "equal")],
)
def test_gradients_of_equal_tokens_are_added_up(device, count, rows, width, kind, dtype):
    tokens = numbers(count, rows, kind)
    gradient = torch.randn(count, width).to(dtype)
    found = table_gradient.table_gradient(gradient.to(device), tokens.to(device), rows).cpu()
    assert found.dtype == dtype
    # One rounding to the dtype, and those of a sum of float32 numbers.
    unit, sizes = torch.finfo(dtype).eps, expected(gradient.abs(), tokens, rows)
    error = (found.double() - expected(gradient, tokens, rows)).abs()
    assert (error <= unit * found.double().abs() + count * 2.0**-24 * sizes).all()


@pytest.mark.parametrize("compared", [16, 64])
def test_more_tokens_than_are_compared_or_added_at_a_time(device, compared, monkeypatch):
    monkeypatch.setattr(table_gradient, "_COMPARED", compared)
    monkeypatch.setattr(table_gradient, "_ADDED", 4)
    tokens = numbers(50, 12, "words")
    gradient = torch.randint(-9, 9, (50, 8)).float()  # whose sums are exact
    found = table_gradient.table_gradient(gradient.to(device), tokens.to(device, torch.int32), 12).cpu()
    assert torch.equal(found.double(), expected(gradient, tokens, 12))


def test_only_rows_of_tokens_get_values_that_are_not_finite(device):
    tokens, gradient = torch.tensor([3, 1, 3]), torch.ones(3, 4)
    gradient[2, 1] = torch.nan
    found = table_gradient.table_gradient(gradient.to(device), tokens.to(device), 6).cpu()
    assert found.isnan().nonzero().tolist() == [[3, 1]]
    assert torch.equal(found[[0, 2, 4, 5]], torch.zeros(4, 4))


def test_a_lookup_has_the_gradient_of_an_embedding(device, monkeypatch):
    if torch.device(device).type == "cpu":
        monkeypatch.setattr(lookup, "can_add", lambda gradient, tokens: True)
    calls, usual = [], table_gradient.table_gradient
    monkeypatch.setattr(lookup, "table_gradient", lambda *given: calls.append(1) or usual(*given))
    table = nn.Embedding(20, 12, device=device)
    tokens = numbers(24, 20, "words").reshape(4, 6).to(device)
    above = torch.randint(-9, 9, (6, 4, 12), device=device).float().transpose(0, 1)
    (plain,) = torch.autograd.grad(table(tokens), table.weight, above)
    with for_data_parallel(0):
        (found,) = torch.autograd.grad(looked_up(table, tokens), table.weight, above)
        assert calls == [1]
        scale = torch.ones((), device=device, requires_grad=True)
        above = above * scale
        (once,) = torch.autograd.grad(looked_up(table, tokens), table.weight, above, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), scale)
    assert torch.equal(found, plain)
    assert torch.equal(twice, above.sum().detach())
    assert calls == [1]  # the second derivative needs PyTorch's operator

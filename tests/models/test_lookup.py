"""Lookups of embeddings in distributed training have the gradients of `nn.Embedding`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gatewise import for_data_parallel
from gatewise.contract import triton_kernels
from gatewise.models import table_gradient
from gatewise.models.lookup import looked_up, new_table

ROWS, WIDTH = 20, 12


def embedding(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Embedding(ROWS, WIDTH, device=device, dtype=dtype)


def gradients(table, tokens, above, **options):
    """Return the gradient of the table by PyTorch's lookup, and by ours."""
    (expected,) = torch.autograd.grad(table(tokens), table.weight, above, **options)
    with for_data_parallel(0):
        (found,) = torch.autograd.grad(looked_up(table, tokens), table.weight, above, **options)
    return expected, found


def test_several_gradients_at_once():
    tokens = torch.randint(ROWS, (4, 6))
    expected, found = gradients(embedding(), tokens, torch.randn(3, 4, 6, WIDTH), is_grads_batched=True)
    assert torch.equal(found, expected)


def test_second_derivatives():
    table, tokens, scale = embedding(), torch.randint(ROWS, (4, 6)), torch.ones((), requires_grad=True)
    above = scale * torch.randn(4, 6, WIDTH)
    _, found = gradients(table, tokens, above, create_graph=True)
    (twice,) = torch.autograd.grad(found.sum(), scale)
    torch.testing.assert_close(twice, above.sum().detach())


@pytest.mark.parametrize("count", [1, 5, 6, 7, 8])
def test_the_kernels_that_are_compiled_ahead_are_those_for_any_number_of_tokens(count):
    """Triton compiles a kernel again for other dtypes, and where an address is not a multiple of 16 bytes."""

    def forms(launches):
        return [
            (each.function, each.constants, [_form(one) for one in each.arguments if isinstance(one, torch.Tensor)])
            for each in launches
        ]

    with triton_kernels.noted() as launched:
        table_gradient.table_gradient(torch.ones(count, WIDTH), torch.zeros(count, dtype=torch.int64), ROWS)
    assert forms(launched) == forms(table_gradient.launches(WIDTH, torch.float32))
    assert [each.function for each in launched] == [table_gradient._ORDER, table_gradient._TABLE]


def _form(tensor):
    return tensor.dtype, tensor.data_ptr() % 16 == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "options", "own"),
    [
        (24, {}, True),
        (24, {"integers": torch.int32}, True),
        (24, {"dtype": torch.bfloat16}, True),
        (24, {"expanded": True}, True),
        (4096, {}, True),
        (4097, {}, False),
        (24, {"dtype": torch.float64}, False),
        (24, {"batched": True}, False),
        (0, {}, False),
    ],
    ids=str,
)
def test_kernels_add_up_what_they_can(count, options, own, monkeypatch):
    pytest.importorskip("triton")
    calls, launch = [], table_gradient.triton_kernels.launch
    monkeypatch.setattr(
        table_gradient.triton_kernels, "launch", lambda *given, **named: calls.append(given) or launch(*given, **named)
    )
    dtype, integers = options.get("dtype", torch.float32), options.get("integers", torch.int64)
    table, tokens = embedding("cuda", dtype), torch.randint(ROWS, (count,), device="cuda", dtype=integers)
    above = torch.randint(-9, 9, (3, count, WIDTH), device="cuda").to(dtype)  # whose sums are nearly all exact
    if not options.get("batched"):
        above = above[0, :1].expand(count, WIDTH) if options.get("expanded") else above[0]
    expected, found = gradients(table, tokens, above, is_grads_batched="batched" in options)
    assert len(calls) == (2 if own else 0)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_the_kernels_are_replayed():
    pytest.importorskip("triton")
    table, tokens = embedding("cuda"), torch.randint(ROWS, (24,), device="cuda")
    above = torch.randint(-9, 9, (24, WIDTH), device="cuda").float()
    expected, _ = gradients(table, tokens, above)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        found = table_gradient.table_gradient(above, tokens, ROWS)
    for _ in range(3):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)


def test_no_values_are_drawn_without_memory(monkeypatch):
    """For a tensor on the device meta, PyTorch's `normal_` imports its compiler, which takes seconds."""
    monkeypatch.setattr(nn.init, "normal_", lambda *given: pytest.fail("drawn"))
    table = new_table(5, 4, "meta")
    assert table.weight.is_meta
    assert table.weight.requires_grad
    assert table.weight.shape == (5, 4)


def test_tables_have_the_initial_values_of_pytorch():
    torch.manual_seed(0)
    expected = nn.Embedding(5, 4).weight
    torch.manual_seed(0)
    assert torch.equal(new_table(5, 4, None).weight, expected)

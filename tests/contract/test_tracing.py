"""Calls of a thread are not taken for traced ones while another thread compiles or exports a model."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import gatewise
from gatewise.contract import tracing


def in_a_thread(function):
    """Call a function in a thread of its own, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def while_exporting(function):
    found = []

    class Module(torch.nn.Module):
        def forward(self, x):
            found.append(in_a_thread(function))
            return x + 1

    torch.export.export(Module(), (torch.randn(2),), strict=False)
    return found[0]


def while_compiling(function):
    found = []

    def backend(graph, inputs):
        found.append(in_a_thread(function))
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.randn(2))
    torch.compiler.reset()
    return found[0]


def packed(layer):
    return layer(pack_sequence([torch.randn(3, 4), torch.randn(2, 4)]))


def hessian_vector_product(layer):
    x = torch.randn(3, 2, 4)
    return torch.autograd.functional.hvp(lambda x: layer(x)[0].pow(2).sum(), x, x)


def stream(layer):
    return layer.eval().stream(batch=2)(torch.randn(2, 4))


def steps(layer):
    return gatewise.Recurrent(gatewise.cells.GRU(), 4, 5)(torch.randn(3, 2, 4), return_steps=True)


def batched(layer):
    return torch.func.vmap(lambda x: layer(x)[0])(torch.randn(5, 3, 2, 4))


@pytest.mark.parametrize("use", [packed, hessian_vector_product, stream, steps, batched])
@pytest.mark.parametrize("meanwhile", [while_exporting, while_compiling])
def test_calls_are_computed_while_another_thread_traces(meanwhile, use):
    layer = gatewise.GRU(4, 5)
    assert meanwhile(lambda: use(layer)) is not None


@pytest.mark.parametrize("meanwhile", [while_exporting, while_compiling])
def test_pytorchs_own_functions_tell_of_any_thread(meanwhile):
    assert meanwhile(torch.compiler.is_compiling)
    assert not meanwhile(tracing.is_compiling)
    assert not meanwhile(tracing.is_exporting)


def test_the_thread_that_traces_is_told_so():
    class Tells(torch.nn.Module):
        def forward(self, x):
            return x + int(tracing.is_compiling()) + 2 * int(tracing.is_exporting())

    x = torch.zeros(2)
    assert torch.export.export(Tells(), (x,), strict=False).module()(x).tolist() == [3, 3]
    assert torch.compile(Tells(), backend="eager", fullgraph=True)(x).tolist() == [1, 1]
    assert Tells()(x).tolist() == [0, 0]
    torch.compiler.reset()

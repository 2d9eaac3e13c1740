"""Resets in the functional calls: explicit passes, saved passes in a file, and the registered operators."""

import json

import pytest
import torch

from gatewise import functional
from gatewise.contract.errors import KernelRefused, ShapeError
from gatewise.functional.operators import lstm_backward, lstm_forward
from gatewise.functional.serialization import rebuild, take_apart

RESETS = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return list(torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True, dtype=torch.float64).parameters())


@pytest.fixture
def given(weights):
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    return x, tuple(torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))


def by_autograd(weights, x, state, **options):
    """Return the outputs, gradients of them, and the gradients of x, of the states and of the weights."""
    y, final = functional.lstm(x, state, weights, bidirectional=True, resets=RESETS, **options)
    dy, dh, dc = (torch.randn_like(tensor) for tensor in (y, *final))
    return (y, *final), (dy, (dh, dc)), torch.autograd.grad([y, *final], [x, *state, *weights], [dy, dh, dc])


def flat(gradients):
    return [gradients.x, *gradients.state, *gradients.weights]


@pytest.mark.parametrize("options", [{}, {"lengths": [5, 0, 3]}, {"memory": "lean"}], ids=str)
def test_the_explicit_passes_are_those_of_autograd(weights, given, options):
    outputs, above, expected = by_autograd(weights, *given, **options)
    (y, final), saved = functional.forward(*given, weights, bidirectional=True, resets=RESETS, **options)
    torch.testing.assert_close((y, *final), outputs)
    torch.testing.assert_close(flat(functional.backward(saved, *above)), list(expected))
    with pytest.raises(KernelRefused, match="resets is given, allowed: none"):
        functional.backward(saved, *above, kernel="aten")


def test_a_saved_pass_travels_with_them(weights, given):
    _, above, expected = by_autograd(weights, *given)
    _, saved = functional.forward(*given, weights, bidirectional=True, resets=RESETS)
    tensors, facts = take_apart(saved)
    again = rebuild(tensors, json.loads(json.dumps(facts)))
    assert again.problem.resets
    torch.testing.assert_close(flat(functional.backward(again, *above)), list(expected))


def test_projected_input(weights, given):
    x, state = given
    expected = functional.lstm(x, state, weights, bidirectional=True, resets=RESETS).y
    products = torch.cat([x @ weights[0].t(), x @ weights[4].t()], -1)
    weights[0] = weights[4] = weights[0][:, :0]
    (y, _), _ = functional.forward(products, state, weights, bidirectional=True, projected=True, resets=RESETS)
    torch.testing.assert_close(y, expected)


# Resets are one more input of the operators, whose fakes `make test` checks in test_operators.py.
@pytest.mark.exhaustive
def test_the_fakes_agree_with_the_operators():
    weights = list(torch.nn.LSTM(4, 6, bidirectional=True, dtype=torch.float64).parameters())
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    state = [torch.zeros(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    options = None, None, True, 0.0, True, "eager", "normal", "lstm", RESETS
    torch.library.opcheck(lstm_forward, (x, *state, weights, *options))
    plain, detached = [weight.detach() for weight in weights], [tensor.detach() for tensor in (x, *state)]
    y, h, c, kept = lstm_forward(*detached, plain, *options)
    above = map(torch.ones_like, (y, h, c))
    arguments = (*above, *detached, plain, None, None, y, kept, True, 0.0, "eager", "normal", "lstm", RESETS, True)
    torch.library.opcheck(lstm_backward, arguments)


def test_one_graph_serves_every_size(weights):
    torch.compiler.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    def call(x, resets, weights):
        return functional.lstm(x, None, weights, bidirectional=True, resets=resets).y

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for time, batch in ((5, 3), (7, 2), (4, 6)):
        x, resets = torch.randn(time, batch, 4, dtype=torch.float64), torch.rand(time, batch) < 0.4
        torch.testing.assert_close(compiled(x, resets, weights), call(x, resets, weights))
    assert len(graphs) == 1


def test_meta_tensors_are_checked(weights):
    weights = [weight.detach().to("meta") for weight in weights]
    x, resets = torch.empty(5, 3, 4, dtype=torch.float64, device="meta"), RESETS.to("meta")
    assert functional.lstm(x, None, weights, bidirectional=True, resets=resets).y.shape == (5, 3, 12)
    with pytest.raises(ShapeError, match="`resets` must be one value for each step"):
        functional.lstm(x, None, weights, bidirectional=True, resets=resets[1:])

"""Several gradients in one backward pass: is_grads_batched, vectorised Jacobians and the transforms of torch.func."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian

from gatewise import GRU, LSTM, Recurrent
from gatewise.cells import LayerNormLSTM, PeepholeLSTM
from gatewise.functional.batched_gradients import is_batched, one_by_one
from gatewise.functional.plan import plan_of
from gatewise.selection import REFERENCE
from tests.pairwise import each_value

LAYERS = {
    "lstm": lambda **options: LSTM(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64, **options),
    "gru": lambda **options: GRU(3, 4, dtype=torch.float64, **options),
    "peephole": lambda **options: Recurrent(PeepholeLSTM(), 3, 4, dtype=torch.float64, **options),
    "layer_norm": lambda **options: Recurrent(LayerNormLSTM(), 3, 4, dtype=torch.float64, **options),
}
KERNELS = ["auto", "eager"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def outputs(layer, x, lengths=None):
    y, finals = layer(x, lengths=lengths)
    return y, *(finals if isinstance(finals, tuple) else (finals,))


@pytest.mark.parametrize(
    ("lengths", "kernel", "name"), each_value([*itertools.product([None, [4, 0, 2]], KERNELS, LAYERS)]), ids=str
)
def test_batched_gradients_are_the_gradients_one_by_one(name, kernel, lengths):
    layer, x = LAYERS[name](kernel=kernel), torch.randn(4, 3, 3, dtype=torch.float64, requires_grad=True)
    found = outputs(layer, x, lengths)
    sources = x, *layer.parameters()
    above = [torch.randn(3, *one.shape, dtype=torch.float64) for one in found]
    batched = torch.autograd.grad(found, sources, above, is_grads_batched=True, retain_graph=True)
    for index in range(3):
        one = torch.autograd.grad(found, sources, [each[index] for each in above], retain_graph=True)
        torch.testing.assert_close([each[index] for each in batched], list(one))
    # The gradient of the output alone, and a second walk of the graph.
    (only,) = torch.autograd.grad(found[0], x, above[0], is_grads_batched=True)
    torch.testing.assert_close(only, torch.stack([gradient(layer, x, lengths, each) for each in above[0]]))


def gradient(layer, x, lengths, above):
    return torch.autograd.grad(outputs(layer, x, lengths)[0], x, above)[0]


@pytest.mark.parametrize(("kernel", "name"), each_value([*itertools.product(KERNELS, LAYERS)]), ids=str)
def test_vectorised_jacobians_and_hessians(name, kernel):
    layer, x = LAYERS[name](kernel=kernel), torch.randn(2, 1, 3, dtype=torch.float64)

    def call(x):
        return layer(x)[0]

    expected = jacobian(call, x)
    torch.testing.assert_close(jacobian(call, x, vectorize=True), expected)
    torch.testing.assert_close(jacobian(call, x, vectorize=True, strategy="forward-mode"), expected)
    torch.testing.assert_close(torch.func.jacrev(call)(x), expected)
    torch.testing.assert_close(torch.func.jacfwd(call)(x), expected)
    assert expected.any()

    def loss(x):
        return call(x).square().sum()

    torch.testing.assert_close(hessian(loss, x, vectorize=True), hessian(loss, x))
    created = jacobian(call, x, vectorize=True, create_graph=True)
    torch.testing.assert_close(created, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_in_forward_mode(name, kernel):
    layer = LAYERS[name](kernel=kernel)
    x, along = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, along), lengths=[4, 0, 2])[0])
    expected = torch.func.jvp(lambda x: layer(x, lengths=[4, 0, 2])[0], (x,), (along,))
    torch.testing.assert_close((y, tangent), expected)
    assert tangent.any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", LAYERS)
def test_vmap_and_gradients_of_each_example(name, kernel):
    layer, x = LAYERS[name](kernel=kernel), torch.randn(4, 3, 3, dtype=torch.float64)
    found = torch.vmap(lambda one: layer(one.unsqueeze(1))[0].squeeze(1), in_dims=1, out_dims=1)(x)
    torch.testing.assert_close(found, layer(x)[0])
    weights = dict(layer.named_parameters())

    def loss(weights, one):
        return torch.func.functional_call(layer, weights, (one.unsqueeze(1),))[0].square().sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 1))(weights, x)
    for index in range(3):
        expected = torch.autograd.grad(loss(weights, x[:, index]), tuple(weights.values()))
        torch.testing.assert_close([gradient[index] for gradient in each.values()], list(expected))


def test_functionalized_calls_with_lengths():
    layer, x = LAYERS["lstm"](), torch.randn(5, 3, 3, dtype=torch.float64)
    for lengths in ([5, 0, 2], torch.tensor([1, 5, 3])):
        found = torch.func.functionalize(lambda x, lengths=lengths: layer(x, lengths=lengths)[0])(x)
        torch.testing.assert_close(found, layer(x, lengths=lengths)[0])


def test_a_second_hidden_dimension():
    seen, more = [], []

    def backward(gradients, follows):
        seen.append(gradients)
        more.append(follows)
        return [None if one is None else 2 * one for one in gradients]

    def inner(a, b):
        first, second, third = one_by_one(backward, [a, b, None])
        assert is_batched(first)
        assert third is None
        return first + second

    a, b = torch.randn(3, 5), torch.randn(2, 5)
    outer = torch._vmap_internals._vmap(lambda a: torch._vmap_internals._vmap(lambda b: inner(a, b))(b))
    torch.testing.assert_close(outer(a), 2 * (a[:, None] + b[None]))
    assert more == [True] * 5 + [False]
    assert not any(is_batched(one) for run in seen for one in run if one is not None)


def test_what_is_kept_serves_all_gradients(request, monkeypatch):
    """A kernel whose backward pass uses up what it kept gets a copy, instead of repeating the forward pass."""
    forwards, run, differentiate = [], type(REFERENCE).forward, type(REFERENCE).backward

    def backward(self, problem, inputs, result, *others):
        found = differentiate(self, problem, inputs, result, *others)
        for tensor in result.kept:
            tensor.fill_(torch.nan)
        return found

    monkeypatch.setattr(type(REFERENCE), "single_use", lambda self, problem: True)
    monkeypatch.setattr(type(REFERENCE), "forward", lambda *arguments: forwards.append(1) or run(*arguments))
    monkeypatch.setattr(type(REFERENCE), "backward", backward)
    request.addfinalizer(plan_of.cache_clear)
    plan_of.cache_clear()
    layer, x = LAYERS["lstm"](kernel="eager"), torch.randn(4, 3, 3, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x)
    above = torch.randn(3, *y.shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(y, x, above, is_grads_batched=True)
    assert len(forwards) == 1
    torch.testing.assert_close(found, torch.stack([gradient(layer, x, None, each) for each in above]))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["persistent", "stepwise", "eager"])
def test_batched_gradients_on_a_gpu(kernel):
    layer = LSTM(24, 32, num_layers=2, device="cuda", kernel=kernel)
    x = torch.randn(5, 4, 24, device="cuda", requires_grad=True)
    above = torch.randn(3, 5, 4, 32, device="cuda")
    (batched,) = torch.autograd.grad(layer(x)[0], x, above, is_grads_batched=True)
    expected = torch.stack([torch.autograd.grad(layer(x)[0], x, each)[0] for each in above])
    torch.testing.assert_close(batched, expected, rtol=1e-3, atol=1e-5)

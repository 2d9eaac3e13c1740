"""The differentiable call: gradients of every order, and memory that is given back."""

import gc
import itertools
import weakref

import pytest
import torch

from gatewise import functional
from gatewise.functional.plan import plan_of
from gatewise.kernels.eager import eager
from tests.pairwise import exhaustive_unless


def make(kernel, **options):
    torch.manual_seed(0)
    module = torch.nn.LSTM(2, 3, dtype=torch.float64, **options)
    rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    hidden = options.get("proj_size") or 3
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(rows, 2, hidden, dtype=torch.float64, requires_grad=True)
    c0 = torch.randn(rows, 2, 3, dtype=torch.float64, requires_grad=True)
    weights = [parameter.detach().requires_grad_() for parameter in module.parameters()]

    def call(x, h0, c0, *weights, **more):
        y, state = functional.lstm(
            x, (h0, c0), weights, bidirectional=options.get("bidirectional", False), kernel=kernel, **more
        )
        return y, *state

    return call, (x, h0, c0, *weights)


def gradgradcheck(call, inputs):
    # Along random directions, as PyTorch's own tests do: every entry of the Jacobian by itself takes half a minute.
    return torch.autograd.gradgradcheck(call, inputs, atol=1e-4, fast_mode=True)


OPTIONS = [{}, {"num_layers": 2, "bidirectional": True}, {"proj_size": 2, "bias": False}]


@pytest.mark.parametrize(
    ("kernel", "options"),
    exhaustive_unless(
        [("eager", OPTIONS[1]), ("aten", OPTIONS[2])],
        itertools.product(["aten", "eager"], OPTIONS),
    ),
    ids=str,
)
def test_first_and_second_derivatives(kernel, options):
    call, inputs = make(kernel, **options)
    assert torch.autograd.gradcheck(call, inputs, fast_mode="num_layers" in options)
    assert gradgradcheck(call, inputs)


@pytest.mark.parametrize(
    ("kernel", "lengths"),
    [
        ("eager", [0, 2]),
        ("aten", [3, 1]),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("eager", [3, 1]), ("aten", [0, 2]))),
    ],
)
def test_derivatives_with_lengths(kernel, lengths):
    call, inputs = make(kernel, bidirectional=True)

    def ragged(*tensors):
        return call(*tensors, lengths=lengths)

    assert torch.autograd.gradcheck(ragged, inputs, fast_mode=True)
    assert gradgradcheck(ragged, inputs)


@pytest.mark.parametrize(
    "options",
    [{}, {"memory": "lean"}, {"lengths": [3, 1]}, {"resets": torch.tensor([[0, 0], [1, 0], [0, 1]])}],
    ids=str,
)
def test_inputs_that_are_computed_from_each_other_get_their_own_gradients(options):
    call, (x, _, _, w_ih, *others) = make("eager")

    def dependent(x, w_ih, *others):
        h0 = (x.mean(0) @ w_ih[:3].t().tanh())[None]  # of the input and of a weight
        w_hh, *biases = others
        return call(x, h0, h0, w_ih, w_hh * x.mean(), *biases, **options)

    leaves = x, w_ih, others[0].detach().requires_grad_(), *others[1:]
    above = [torch.randn_like(output) for output in dependent(*leaves)]
    first = torch.autograd.grad(dependent(*leaves), leaves, above)
    torch.testing.assert_close(torch.autograd.grad(dependent(*leaves), leaves, above, create_graph=True), first)
    assert gradgradcheck(dependent, leaves)


def test_weights_that_are_one_tensor_get_the_gradients_of_both_uses():
    call, (x, h0, c0, _, *others) = make("eager", num_layers=2)
    w_hh, b_ih, b_hh = others[:3]
    square = torch.randn_like(w_hh).requires_grad_()
    x = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)

    def tied(*leaves):
        x, h0, c0, *weights = leaves
        return call(x, h0, c0, *weights, *weights, memory="lean")

    leaves = x, h0, c0, square, w_hh, b_ih, b_hh
    above = [torch.randn_like(output) for output in tied(*leaves)]
    first = torch.autograd.grad(tied(*leaves), leaves, above)
    torch.testing.assert_close(torch.autograd.grad(tied(*leaves), leaves, above, create_graph=True), first)


@pytest.mark.parametrize("kernel", ["eager", "aten"])
def test_only_what_requires_a_gradient_gets_one(kernel):
    call, inputs = make(kernel)
    for wanted in range(len(inputs)):
        tensors = [tensor.detach().requires_grad_(index == wanted) for index, tensor in enumerate(inputs)]
        call(*tensors)[0].sum().backward()
        assert [tensor.grad is not None for tensor in tensors] == [index == wanted for index in range(len(inputs))]


def test_no_grad_keeps_nothing():
    call, inputs = make("eager")
    with torch.no_grad():
        assert all(output.grad_fn is None for output in call(*inputs))


def test_a_graph_can_be_walked_twice():
    call, inputs = make("aten")
    loss = call(*inputs)[0].square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(loss, inputs), rtol=0, atol=0)


def test_what_is_kept_survives_a_walk_that_another_one_follows(request, monkeypatch, passes_alone):
    """A backward pass that uses it up gets a copy; otherwise the next one would repeat the forward pass."""
    forwards, run, differentiate = [], type(eager).forward, type(eager).backward

    def backward(self, problem, inputs, result, *others):
        found = differentiate(self, problem, inputs, result, *others)
        for tensor in result.kept:
            tensor.fill_(torch.nan)
        return found

    monkeypatch.setattr(type(eager), "single_use", lambda self, problem: True)
    monkeypatch.setattr(type(eager), "forward", lambda *arguments: forwards.append(1) or run(*arguments))
    monkeypatch.setattr(type(eager), "backward", backward)
    request.addfinalizer(plan_of.cache_clear)
    plan_of.cache_clear()
    call, inputs = make("eager")
    loss = call(*inputs)[0].square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(loss, inputs, retain_graph=True), rtol=0, atol=0)
    torch.testing.assert_close(first, torch.autograd.grad(loss, inputs), rtol=0, atol=0)
    assert len(forwards) == 1


def test_a_weight_changed_in_place_before_backward_is_an_error():
    call, inputs = make("eager")
    weight = inputs[3].detach().clone().requires_grad_()
    y = call(*inputs[:3], weight, *inputs[4:])[0]
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kernel", ["eager", "aten"])
def test_outputs_do_not_keep_themselves_alive(kernel):
    call, inputs = make(kernel)
    gc.collect()
    gc.disable()
    try:
        y, *_ = call(*inputs)
        alive = weakref.ref(y)
        del y, _
        assert alive() is None
    finally:
        gc.enable()


def test_saved_tensor_hooks_see_what_is_kept():
    call, inputs = make("eager")
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        y = call(*inputs)[0]
    assert len(packed) > len(inputs)
    y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype(dtype):
    module = torch.nn.LSTM(4, 8)
    x = torch.randn(5, 2, 4)
    with torch.autocast("cpu", dtype):
        y, (h, c) = functional.lstm(x, None, module.all_weights, kernel="eager")
    assert y.dtype == h.dtype == c.dtype == dtype
    y.float().sum().backward()
    assert module.weight_hh_l0.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype):
        y, _ = functional.lstm(x.double(), None, [w.double() for w in module.parameters()])
    assert y.dtype == torch.float64


def test_autocast_does_not_reach_into_the_explicit_passes():
    module = torch.nn.LSTM(4, 8, dtype=torch.float32)
    x = torch.randn(5, 2, 4)
    (expected, _), _ = functional.forward(x, None, module.all_weights, kernel="eager")
    with torch.autocast("cpu", torch.bfloat16):
        (y, _), saved = functional.forward(x, None, module.all_weights, kernel="eager")
        gradients = functional.backward(saved, torch.ones_like(y))
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert gradients.x.dtype == torch.float32

"""A direction unrolled over time: against torch.nn.LSTM in float64, autograd, and numerical derivatives."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from gatewise.cells import lstm, unroll
from gatewise.contract.saved import Needs
from gatewise.contract.weights import DirectionWeights


@st.composite
def directions(draw):
    """Inputs of one direction of one layer, float64."""
    time, batch = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    input_size, hidden_size = draw(st.sampled_from([1, 3, 31])), draw(st.sampled_from([1, 2, 3, 31]))
    proj_size = draw(st.sampled_from([0, 1])) if hidden_size > 1 else 0
    bias = draw(st.booleans())
    lengths = draw(st.none() | st.lists(st.integers(0, time), min_size=batch, max_size=batch))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return build(time, batch, input_size, hidden_size, proj_size, bias, lengths, generator), draw(st.booleans())


def build(time, batch, input_size, hidden_size, proj_size, bias, lengths, generator):
    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state, gates = proj_size or hidden_size, 4 * hidden_size
    weights = DirectionWeights(
        drawn(gates, input_size) * 0.5,
        drawn(gates, state) * 0.5,
        drawn(gates) if bias else None,
        drawn(gates) if bias else None,
        drawn(proj_size, hidden_size) if proj_size else None,
    )
    lengths = None if lengths is None else torch.tensor(lengths)
    return drawn(time, batch, input_size), drawn(batch, state), drawn(batch, hidden_size), weights, lengths


def torchs(x, h0, c0, weights, lengths, reverse):
    """One row at a time through torch.nn.LSTM; a reverse direction is a reversed row."""
    projected = weights.w_hr is not None
    module = torch.nn.LSTM(
        x.shape[2],
        c0.shape[1],
        bias=weights.b_ih is not None,
        proj_size=h0.shape[1] if projected else 0,
        dtype=torch.float64,
    )
    parameters = dict(zip((name for name, _ in module.named_parameters()), weights.tensors(), strict=True))
    y, h_n, c_n = [], [], []
    for row in range(x.shape[1]):
        length = x.shape[0] if lengths is None else int(lengths[row])
        h, c = h0[None, row : row + 1], c0[None, row : row + 1]
        out = x.new_zeros(x.shape[0], 1, h0.shape[1])
        if length:
            steps = x[:length, row : row + 1]
            arguments = (steps.flip(0) if reverse else steps, (h, c))
            some, (h, c) = torch.func.functional_call(module, parameters, arguments)
            out = torch.cat([some.flip(0) if reverse else some, out[length:]])
        y.append(out)
        h_n.append(h[0])
        c_n.append(c[0])
    return torch.cat(y, 1), torch.cat(h_n), torch.cat(c_n)


def leaves_of(x, h0, c0, weights):
    return [tensor.requires_grad_() for tensor in (x, h0, c0, *weights.tensors())]


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(directions())
def test_forward_and_backward_are_torchs(drawn):
    (x, h0, c0, weights, lengths), reverse = drawn
    leaves = leaves_of(x, h0, c0, weights)
    expected = torchs(x, h0, c0, weights, lengths, reverse)
    above = [torch.randn_like(output) for output in expected]
    # Without any step of any row, y is torch.zeros and hangs on nothing.
    outputs, given = zip(*(pair for pair in zip(expected, above, strict=True) if pair[0].requires_grad), strict=True)
    expected_gradients = torch.autograd.grad(outputs, leaves, given, materialize_grads=True)
    with torch.no_grad():
        run = unroll.forward(x, h0, c0, weights, reverse=reverse, lengths=lengths, keep=True)
        found = unroll.backward(x, h0, c0, weights, run.y, run.kept, *above, reverse=reverse, lengths=lengths)
    for mine, theirs in zip(run[:3], expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip((*found[:3], *found.weights), expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(directions())
def test_autograd_through_forward_gives_the_adjoint(drawn):
    (x, h0, c0, weights, lengths), reverse = drawn
    leaves = leaves_of(x, h0, c0, weights)
    recorded = unroll.forward(x, h0, c0, weights, reverse=reverse, lengths=lengths, keep=True)
    above = [torch.randn_like(output) for output in recorded[:3]]
    expected = torch.autograd.grad(recorded[:3], leaves, above, materialize_grads=True)
    with torch.no_grad():
        plain = unroll.forward(x, h0, c0, weights, reverse=reverse, lengths=lengths, keep=True)
        found = unroll.backward(x, h0, c0, weights, plain.y, plain.kept, *above, reverse=reverse, lengths=lengths)
    for mine, theirs in zip(recorded[:3], plain[:3], strict=True):
        torch.testing.assert_close(mine.detach(), theirs)
    for mine, theirs in zip((*found[:3], *found.weights), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("lengths", [None, [2, 3, 0]], ids=["dense", "lengths"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("proj_size", [0, 1])
def test_numerical_first_and_second_derivatives(lengths, reverse, proj_size):
    generator = torch.Generator().manual_seed(1)
    x, h0, c0, weights, lengths = build(3, 3, 2, 2, proj_size, True, lengths, generator)

    def run(x, h0, c0, *tensors):
        given = DirectionWeights.from_tensors(tensors)
        return unroll.forward(x, h0, c0, given, reverse=reverse, lengths=lengths)[:3]

    leaves = leaves_of(x, h0, c0, weights)
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_garbage_in_padding_does_not_reach_autograd(reverse):
    generator = torch.Generator().manual_seed(2)
    x, h0, c0, weights, lengths = build(4, 3, 3, 5, 0, True, [2, 0, 4], generator)
    above = None
    results = []
    for garbage in (0.0, float("nan")):
        real = (torch.arange(4)[:, None] < lengths).unsqueeze(2)
        leaves = [t.detach().clone().requires_grad_() for t in (torch.where(real, x, garbage), h0, c0)]
        tensors = [t.detach().clone().requires_grad_() for t in weights.tensors()]
        given = DirectionWeights.from_tensors(tensors)
        outputs = unroll.forward(*leaves, given, reverse=reverse, lengths=lengths)[:3]
        above = above or [torch.randn_like(output) for output in outputs]
        results.append((*outputs, *torch.autograd.grad(outputs, [*leaves, *tensors], above)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("lengths", [None, [9, 4, 0]], ids=["dense", "lengths"])
def test_blocks_of_steps_do_not_show(lengths, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    x, h0, c0, weights, lengths = build(9, 3, 3, 5, 2, True, lengths, generator)
    run = unroll.forward(x, h0, c0, weights, lengths=lengths, keep=True)
    above = [torch.randn_like(output) for output in run[:3]]
    whole = unroll.backward(x, h0, c0, weights, run.y, run.kept, *above, lengths=lengths)
    for steps in (1, 2, 4):
        monkeypatch.setitem(unroll._BLOCKS, "cpu", (steps, 1))
        assert unroll.block_steps(3, 5, "cpu") == steps
        parts = unroll.backward(x, h0, c0, weights, run.y, run.kept, *above, lengths=lengths)
        for mine, theirs in zip((*parts[:3], *parts.weights), (*whole[:3], *whole.weights), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_backward_may_run_twice_and_leaves_what_was_kept():
    generator = torch.Generator().manual_seed(4)
    x, h0, c0, weights, _ = build(5, 3, 3, 5, 0, True, None, generator)
    run = unroll.forward(x, h0, c0, weights, keep=True)
    copies = [tensor.clone() for tensor in run.kept]
    above = [torch.randn_like(output) for output in run[:3]]
    first, second = (unroll.backward(x, h0, c0, weights, run.y, run.kept, *above, needs=Needs()) for _ in range(2))
    assert torch.equal(first.x, second.x)
    for tensor, copy in zip(run.kept, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_half_run_rounds_only_the_operands_of_products(dtype):
    generator = torch.Generator().manual_seed(5)
    x, h0, c0, weights, _ = build(40, 3, 3, 31, 0, True, None, generator)
    half = DirectionWeights(*(None if tensor is None else tensor.to(dtype) for tensor in weights))
    with torch.no_grad():
        run = unroll.forward(x.to(dtype), h0.to(dtype), c0.to(dtype), half, keep=True)
    assert (run.y.dtype, run.h_n.dtype, run.c_n.dtype) == (dtype, dtype, dtype)
    assert (run.kept.z.dtype, run.kept.c.dtype) == (dtype, lstm.state_dtype(dtype))
    replayed = c0.to(dtype).float()
    for z, c in zip(run.kept.z, run.kept.c, strict=True):
        _, replayed = lstm.step(z, replayed)
        assert torch.equal(replayed, c)

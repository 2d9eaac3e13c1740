"""In TF32 the gradients of the gate sums take the place of the kept gates."""

import pytest
import torch

import gatewise
from gatewise import functional, testing
from gatewise.contract.errors import ExchangeTimeout
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent import replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.launches import failure
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.persistent.sizes.exactness import rounds_to_tf32

pytestmark = pytest.mark.gpu

PROBLEMS = {
    "plain": Problem(12, 40, 24, 256),
    "one-block-no-cluster": Problem(9, 64, 24, 256),
    "clusters": Problem(9, 70, 40, 520),
    "odd": Problem(9, 33, 31, 250, bidirectional=True, num_layers=2),
    "wide": Problem(4, 20, 24, 1500),
    "ragged": Problem(17, 70, 40, 256, layout=Layout.DEVICE_LENGTHS, bidirectional=True),
    "many-groups": Problem(5, 300, 64, 512),
    "layers-beside-each-other": Problem(12, 20, 24, 264, num_layers=2),
    "projected": Problem(9, 40, 24, 264, proj_size=40),
}


def in_tf32(problem):
    return problem.replace(dtype=torch.float32, allow_tf32=True, needs_grad=True)


def gradients_of(problem, inputs, above):
    result = persistent.forward(problem, inputs)
    return result, persistent.backward(problem, inputs, result, above, Needs())


def flat(found):
    return (found.x, found.h0, found.c0, *found.weights)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_bits_as_in_memory_of_their_own(name, monkeypatch):
    problem = in_tf32(PROBLEMS[name])
    assert rounds_to_tf32(problem)
    inputs = testing.make_inputs(problem, "cuda")
    above = testing.make_gradients(problem, inputs)
    before = persistent.forward(problem, inputs)
    untouched = [tensor.clone() for tensor in before.kept]
    found = persistent.backward(problem, inputs, before, above, Needs())
    assert any(not torch.equal(old, new) for old, new in zip(untouched, before.kept, strict=True))
    replay._replays.cache_clear()
    monkeypatch.setattr(memory, "exchanges_in_gates", lambda problem: False)
    result = persistent.forward(problem, inputs)
    kept = [tensor.clone() for tensor in result.kept]
    apart = persistent.backward(problem, inputs, result, above, Needs())
    replay._replays.cache_clear()
    assert all(torch.equal(old, new) for old, new in zip(kept, result.kept, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(flat(found), flat(apart), strict=True))


def test_a_second_backward_pass_repeats_the_forward_pass():
    layer = gatewise.LSTM(40, 256, device="cuda", kernel="persistent")
    x = torch.randn(9, 40, 40, device="cuda")
    (y, _), saved = functional.forward(x, None, layer.all_weights, kernel="persistent")
    first = functional.backward(saved, torch.ones_like(y))
    assert saved.spent
    second = functional.backward(saved, torch.ones_like(y))
    assert torch.equal(first.x, second.x)
    assert all(torch.equal(one, other) for one, other in zip(first.weights[0], second.weights[0], strict=True))


def test_a_graph_can_be_walked_twice():
    layer = gatewise.LSTM(40, 256, num_layers=2, device="cuda", kernel="persistent")
    x = torch.randn(9, 40, 40, device="cuda", requires_grad=True)
    for _ in range(4):  # launched, and replayed
        loss = layer(x)[0].square().sum()
        first = torch.autograd.grad(loss, (x, *layer.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, (x, *layer.parameters()))  # which uses up what is kept
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_what_a_compiled_call_keeps_is_left_as_it_is():
    problem = in_tf32(PROBLEMS["plain"]).replace(traced=True)
    inputs = testing.make_inputs(problem, "cuda")
    result = persistent.forward(problem, inputs)
    kept = [tensor.clone() for tensor in result.kept]
    persistent.backward(problem, inputs, result, testing.make_gradients(problem, inputs), Needs())
    assert all(torch.equal(old, new) for old, new in zip(kept, result.kept, strict=True))


@pytest.mark.parametrize("name", ["one-block-no-cluster", "clusters"])
def test_a_wait_given_up_comes_out_as_nan(name, monkeypatch):
    """What is in the place of what was waited for is a number."""
    problem = in_tf32(PROBLEMS[name])
    inputs = testing.make_inputs(problem, "cuda")
    above = testing.make_gradients(problem, inputs)
    _, expected = gradients_of(problem, inputs, above)
    result = persistent.forward(problem, inputs)
    replay._replays.cache_clear()
    monkeypatch.setattr(failure, "PATIENCE", 0)
    lost = persistent.backward(problem, inputs, result, above, Needs())
    torch.cuda.synchronize()
    monkeypatch.undo()
    replay._replays.cache_clear()
    assert lost.x.isnan().any()
    torch.testing.assert_close(
        lost.x.where(~lost.x.isnan(), 0), expected.x.where(~lost.x.isnan(), 0), atol=2e-3, rtol=0
    )
    with pytest.raises(ExchangeTimeout):
        persistent.forward(problem, inputs)
    _, again = gradients_of(problem, inputs, above)
    assert all(torch.equal(one, other) for one, other in zip(flat(again), flat(expected), strict=True))


@pytest.mark.parametrize(
    "biases", [(8.0, 8.0, 8.0, 8.0), (-6.0, 6.0, 0.0, 3.0), (11.0, -11.0, -9.0, 11.0), (40.0,) * 4]
)
def test_saturated_gates(biases):
    """Gradients of a gate near 1 are multiples of its distance from 1, which what is kept must not blur."""
    problem = in_tf32(Problem(20, 40, 64, 256))
    inputs = testing.make_inputs(problem, "cuda")
    inputs.weights[2].view(4, -1).add_(torch.tensor(biases, device="cuda").unsqueeze(1))
    above = testing.make_gradients(problem, inputs)
    exact = testing.named(problem, *testing.oracle(problem, inputs, above))
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, above))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        there = testing.reference(problem, inputs, above, dtype=torch.float32, device="cuda")
    theirs = testing.named(problem, *there)
    for name, tensor in found.items():
        error, other = (testing.relative_error(each, exact[name]) for each in (tensor, theirs[name]))
        assert error <= 2 * (other + 2.0**-11), name

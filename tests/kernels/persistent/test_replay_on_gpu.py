"""Replayed calls on a device: the bits of launched ones, whatever happens between them."""

import threading

import pytest
import torch

import gatewise
from gatewise import testing
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.persistent import replay
from gatewise.kernels.persistent.kernel import persistent

pytestmark = pytest.mark.gpu

PROBLEM = Problem(20, 9, 48, 64, num_layers=2, dtype=torch.bfloat16, needs_grad=True)
KINDS = [
    PROBLEM,
    PROBLEM.replace(hidden_size=61, input_size=31, bidirectional=True),
    PROBLEM.replace(num_layers=4, dropout=0.3),
    PROBLEM.replace(num_layers=1, bias=False, dtype=torch.float16),
    PROBLEM.replace(dtype=torch.float32, allow_tf32=True, hidden_size=260),
    PROBLEM.replace(dtype=torch.float32, batch=70),
    PROBLEM.replace(layout=Layout.DEVICE_LENGTHS, bidirectional=True, hidden_size=61),
    PROBLEM.replace(float32_gradients=True),
    PROBLEM.replace(hidden_size=60, input_size=31, bidirectional=True, float32_gradients=True),
]


@pytest.fixture(autouse=True)
def afresh():
    replay._replays.cache_clear()
    replay.stack_of.cache_clear()
    yield
    torch.cuda.synchronize()


def counts(problem):
    found = [replay._replays(name, problem, False, Needs()) for name in ("forward", "backward")]
    return [one.recorded for one in found], [one.replayed for one in found]


def step(problem, inputs, gradients):
    result, found = testing.run_kernel(persistent, problem, inputs, gradients)
    return [*result[:3], *found[:3], *found.weights]


@pytest.mark.parametrize("problem", KINDS, ids=str)
def test_replays_have_the_bits_of_launches(problem):
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    first = [tensor.clone() for tensor in step(problem, inputs, gradients)]
    for _ in range(8):
        found = step(problem, inputs, gradients)
        assert all(torch.equal(*pair) for pair in zip(found, first, strict=True))
        del found
    recorded, replayed = counts(problem)
    assert min(recorded) >= 1
    assert min(replayed) >= 3


@pytest.mark.parametrize("problem", [*KINDS, PROBLEM.replace(time=1)], ids=str)
def test_addresses_that_never_come_back_give_the_bits_of_launches(problem, monkeypatch):
    monkeypatch.setattr(replay, "_PATIENCE_OF_A_STEP", replay._PATIENCE)
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    first = [tensor.clone() for tensor in step(problem, inputs, gradients)]
    held = []
    for _ in range(60):
        elsewhere = inputs._replace(
            **{name: getattr(inputs, name).clone() for name in ("x", "h0", "c0")},
            masks=tuple(mask.clone() for mask in inputs.masks),
        )
        above = type(gradients)(*(gradient.clone() for gradient in gradients))
        held.append((elsewhere, above, step(problem, elsewhere, above)))
    assert all(torch.equal(*pair) for _, _, found in held for pair in zip(found, first, strict=True))
    sizes = [replay._replays(name, problem, False, Needs()).scratch_bytes for name in ("forward", "backward")]
    if max(*sizes, replay.kept_bytes(problem)) <= 2**20:  # then graphs have memory of their own in place of all tensors
        assert counts(problem)[0] == [1, 1]
        assert min(counts(problem)[1]) >= 20
    for elsewhere, above, _ in held:  # nobody wrote where an earlier call read
        assert torch.equal(elsewhere.x, inputs.x)
        assert torch.equal(elsewhere.c0, inputs.c0)
        assert all(torch.equal(*pair) for pair in zip(above, gradients, strict=True))


def test_a_state_that_is_carried_among_other_allocations():
    """Its addresses move on with every step, so that graphs need memory of their own for it."""
    inputs = testing.make_inputs(PROBLEM, "cuda")
    gradients = testing.make_gradients(PROBLEM, inputs)
    states, held = {}, []
    for replays in (False, True):
        own = inputs
        for index in range(100):
            if not replays:
                replay._replays.cache_clear()
                replay.stack_of.cache_clear()
            held.append(torch.empty(1 + index * 70_001 % 300_000, device="cuda"))
            del held[: -3 - index % 7]
            _, h_n, c_n, *_ = step(PROBLEM, own, gradients)
            own = inputs._replace(h0=h_n, c0=c_n)
            states.setdefault(replays, []).append(h_n.clone())
    assert agree(states[True], states[False])
    assert min(counts(PROBLEM)[1]) >= 40


def losses(module, steps, *, between=lambda: None, streams=None):
    """Train for a few steps on data that changes in place; return everything that a step shows."""
    torch.manual_seed(0)
    x = torch.empty(12, 8, module.input_size, device="cuda", dtype=torch.bfloat16)
    seen = []
    for index in range(steps):
        with torch.cuda.stream(None if streams is None else streams[index % len(streams)]):
            torch.cuda.synchronize()
            x.copy_(torch.randn(x.shape))
            module.zero_grad(set_to_none=True)
            y, (h_n, c_n) = module(x)
            (y.float().square().sum() + h_n.float().sum()).backward()
            between()
            seen += [y.detach().clone(), c_n.detach().clone(), *(weight.grad.clone() for weight in module.parameters())]
            with torch.no_grad():
                for weight in module.parameters():
                    weight -= 1e-3 * weight.grad
            del y, h_n, c_n
            torch.cuda.synchronize()
    return seen


def module():
    torch.manual_seed(1)
    return gatewise.LSTM(40, 72, 2, device="cuda", dtype=torch.bfloat16, kernel="persistent")


def launched_losses(monkeypatch, steps):
    with monkeypatch.context() as patch:
        patch.setattr(replay.Replays, "play", lambda self, settings, tensors, device, issue: issue(tensors))
        return losses(module(), steps)


@pytest.fixture
def launched(monkeypatch):
    return launched_losses(monkeypatch, 10)


def agree(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_weights_that_change_in_place(launched):
    assert agree(losses(module(), 10), launched)


def test_other_allocations_between_steps(monkeypatch):
    launched = launched_losses(monkeypatch, 30)
    sizes, held = iter(range(1, 1000)), []

    def between():
        held.append(torch.empty(next(sizes) * 70_001 % 3_000_000, device="cuda"))
        del held[:-4]

    assert agree(losses(module(), 30, between=between), launched)


def test_memory_that_is_given_back_between_steps(launched):
    assert agree(losses(module(), 10, between=torch.cuda.empty_cache), launched)


def test_two_streams_in_turn(launched):
    assert agree(losses(module(), 10, streams=[torch.cuda.Stream() for _ in range(2)]), launched)


def test_another_thread_that_allocates(launched):
    stop = threading.Event()

    def allocate():
        while not stop.is_set():
            torch.zeros(1000, device="cuda").add_(1)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        inputs = testing.make_inputs(PROBLEM, "cuda")
        gradients = testing.make_gradients(PROBLEM, inputs)
        for _ in range(20):
            step(PROBLEM, inputs, gradients)
        assert min(counts(PROBLEM)[1]) > 0
        assert agree(losses(module(), 10), launched)
    finally:
        stop.set()
        thread.join()


def test_several_passes_before_their_backward():
    layer, x = module(), torch.randn(12, 8, 40, device="cuda", dtype=torch.bfloat16)
    seen = []
    for _ in range(6):
        layer.zero_grad(set_to_none=True)
        outputs = [layer(scale * x)[0] for scale in (1.0, 0.5, 0.25)]
        for y in reversed(outputs):
            y.float().square().sum().backward(retain_graph=True)
        outputs[1].float().square().sum().backward()
        seen.append([weight.grad.clone() for weight in layer.parameters()])
        del outputs, y
    assert all(agree(found, seen[0]) for found in seen[1:])


def test_inference_mode_and_no_grad():
    layer, x = module(), torch.randn(12, 8, 40, device="cuda", dtype=torch.bfloat16)
    expected = layer(x)[0].detach()
    for _ in range(5):
        with torch.inference_mode():
            assert torch.equal(layer(x)[0], expected)
        with torch.no_grad():
            assert torch.equal(layer(x)[0], expected)


def test_a_graph_of_the_user_holds_launches_not_replays():
    layer, x = module().eval(), torch.randn(12, 8, 40, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(4):
            expected = layer(x)[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)[0]
        x.mul_(2)
        graph.replay()
        assert torch.equal(y, layer(x)[0])
        assert not torch.equal(y, expected)

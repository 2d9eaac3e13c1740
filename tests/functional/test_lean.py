"""Training in little memory: the same numbers, less kept, and kernels that cannot refuse."""

import copy

import pytest
import torch

import gatewise
from gatewise import functional
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError, KernelRefused
from gatewise.contract.problem import Problem
from gatewise.kernels import ALL
from gatewise.kernels.eager import eager
from gatewise.kernels.persistent.kernel import persistent
from gatewise.selection import cost
from gatewise.selection.admit import verdict

H200 = Device.named("h200")
LARGE = Problem(200, 64, 256, 256, dtype=torch.bfloat16, needs_grad=True)


def layers(**options):
    torch.manual_seed(0)
    normal = gatewise.LSTM(3, 5, **options)
    lean = gatewise.LSTM(3, 5, **options, memory="lean")
    lean.load_state_dict(normal.state_dict())
    return normal, lean


def step(module, x, lengths=None):
    x = x.clone().requires_grad_()
    y, (h_n, c_n) = module(x, None, lengths)
    (y.sin().sum() + h_n.cos().sum() + c_n.sum()).backward()
    return y, x.grad, [weight.grad.clone() for weight in module.parameters()]


@pytest.mark.parametrize("lengths", [None, [7, 1, 0, 4]], ids=["equal", "ragged"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_computes_the_same(lengths, bidirectional, dtype):
    normal, lean = layers(num_layers=2, bidirectional=bidirectional, kernel="eager", dtype=dtype)
    x = torch.randn(7, 4, 3, dtype=dtype)
    for ours, expected in zip(step(lean, x, lengths), step(normal, x, lengths), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_keeps_less():
    x = torch.randn(7, 4, 3)
    normal, _ = layers(num_layers=2)
    kept = {}
    for memory in ("normal", "lean"):
        _, saved = functional.forward(x, None, normal.all_weights, memory=memory, kernel="eager")
        kept[memory] = [tuple(tensor.shape) for tensor in saved.result.kept]
    assert kept["lean"] == [(7, 4, 5)]  # the first layer's output
    assert len(kept["normal"]) > 1


def test_autograd_holds_less_between_the_passes():
    held = {}
    for module in layers(num_layers=2):
        x = torch.randn(7, 4, 3, requires_grad=True)
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), gatewise.use_kernel("eager"):
            module(x)
        held[module.memory] = sum(sizes)
    assert held["lean"] < held["normal"]


@pytest.mark.parametrize("kernel", [kernel for kernel in ALL if kernel.name not in ("persistent", "eager")])
def test_kernels_that_keep_more_refuse_in_training_alone(kernel):
    found = verdict(kernel, LARGE.replace(lean=True), H200)
    assert "memory is 'lean', allowed: 'normal' in training" in [str(refusal) for refusal in found.refusals]
    inferring = verdict(kernel, LARGE.replace(lean=True, needs_grad=False), H200)
    assert "memory" not in [refusal.quantity for refusal in inferring.refusals]


def test_the_decision_says_it():
    lstm = gatewise.LSTM(512, 512, memory="lean", device="meta", dtype=torch.bfloat16)
    decision = gatewise.explain(lstm, (100, 64, 512), device="h200")
    assert decision.chosen == "persistent"
    assert "training, lean memory" in str(decision)
    assert "memory is 'lean'" in str(decision)
    assert gatewise.explain(lstm.eval(), (100, 64, 512), device="h200").problem.lean
    assert "lean" not in str(gatewise.explain(lstm.eval(), (100, 64, 512), device="h200"))


def test_a_named_kernel_that_keeps_more_raises():
    _, lean = layers(kernel="aten")
    with pytest.raises(KernelRefused, match="memory is 'lean', allowed: 'normal' in training"):
        lean(torch.randn(7, 4, 3))
    with torch.no_grad():
        lean(torch.randn(7, 4, 3))


def test_bad_words_are_named():
    message = "`memory` must be 'normal' or 'lean', got 'small'."
    with pytest.raises(ArgumentError, match=message):
        gatewise.LSTM(3, 5, memory="small")
    module = gatewise.LSTM(3, 5)
    with pytest.raises(ArgumentError, match=message):
        functional.lstm(torch.randn(7, 4, 3), None, module.all_weights, memory="small")
    with pytest.raises(ArgumentError, match=message):
        functional.forward(torch.randn(7, 4, 3), None, module.all_weights, memory="small")


def test_the_option_survives_copies_and_older_pickles():
    _, lean = layers()
    assert "memory=lean" in repr(lean)
    assert copy.deepcopy(lean).memory == "lean"
    state = lean.__getstate__() if hasattr(lean, "__getstate__") else lean.__dict__.copy()
    state = {name: value for name, value in state.items() if name != "memory"}
    older = gatewise.LSTM.__new__(gatewise.LSTM)
    older.__setstate__(state)
    assert older.memory == "normal"


def test_compiled_calls_keep_little_too():
    _, lean = layers(num_layers=2)
    x = torch.randn(7, 4, 3)
    eager_step = step(lean, x)
    for weight in lean.parameters():
        weight.grad = None
    y, dx, weights = step(torch.compile(lean, backend="aot_eager"), x)
    torch.testing.assert_close(y, eager_step[0])
    torch.testing.assert_close(dx, eager_step[1])
    torch.testing.assert_close(weights, eager_step[2])


@pytest.mark.parametrize(
    "problem",
    [LARGE, LARGE.replace(num_layers=2, bidirectional=True), LARGE.replace(hidden_size=250, input_size=250)],
    ids=["plain", "stack", "odd"],
)
@pytest.mark.parametrize("kernel", [persistent, eager], ids=lambda kernel: kernel.name)
def test_predicts_less_memory_and_more_time(kernel, problem):
    if kernel is eager and problem.num_layers == 1:
        pytest.skip("a single layer's peak is in its backward pass, where all is at hand again")
    lean = problem.replace(lean=True)
    works = [kernel.work(each, H200) for each in (problem, lean)]
    peaks = [cost.peak_bytes(kernel, each, H200) for each in (problem, lean)]
    times = [cost.seconds(kernel.name, work, each, H200) for work, each in zip(works, (problem, lean), strict=True)]
    assert peaks[1] < peaks[0]
    assert times[1] > times[0]

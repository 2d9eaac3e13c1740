"""Two layers in one launch on a device: against the float64 oracle, with the traps that are theirs."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.persistent import dry_run, launches, replay
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import layer_pairs
from gatewise.selection import cost
from gatewise.selection.timing import peak_memory

pytestmark = pytest.mark.gpu

NUMBERS = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "TF32": {"dtype": torch.float32, "allow_tf32": True},
    "exact": {"dtype": torch.float32},
}
STACK = Problem(9, 5, 31, 64, num_layers=2, needs_grad=True)
SHAPES = {
    "one-unit": STACK.replace(hidden_size=1, batch=1, input_size=1),
    "three-units": STACK.replace(hidden_size=3, batch=3, time=31),
    "odd": STACK.replace(hidden_size=31, time=40),
    "one-step": STACK.replace(time=1),
    "one-row": STACK.replace(batch=1, hidden_size=200, time=31),
    "no-bias": STACK.replace(bias=False),
    "three-layers": STACK.replace(num_layers=3, hidden_size=128, batch=20),
    "four-layers": STACK.replace(num_layers=4, hidden_size=200, batch=20),
    "groups": STACK.replace(hidden_size=256, batch=70),
    "groups-in-turn": STACK.replace(hidden_size=512, batch=300, time=5),
    "clusters": STACK.replace(hidden_size=512, batch=8, time=31),
    "odd-and-wide": STACK.replace(hidden_size=650, batch=20),
    "dropout": STACK.replace(hidden_size=128, batch=20, time=31, dropout=0.4),
    "dropout-odd-ragged": STACK.replace(num_layers=4, dropout=0.4, layout=Layout.DEVICE_LENGTHS),
    "ragged": STACK.replace(hidden_size=128, batch=40, time=31, layout=Layout.DEVICE_LENGTHS),
    "ragged-odd": STACK.replace(hidden_size=61, batch=40, time=31, num_layers=3, layout=Layout.HOST_LENGTHS),
}


@pytest.fixture(autouse=True)
def in_pairs(monkeypatch):
    """Layers in pairs wherever there is room, faster or not."""
    monkeypatch.setattr(layer_pairs, "stacked_cut", layer_pairs.room_for_two)
    for remembered in (replay._replays, replay.stack_of, dry_run._memory_of):
        remembered.cache_clear()
    yield
    for remembered in (replay._replays, replay.stack_of, dry_run._memory_of):
        remembered.cache_clear()


def run(problem, inputs=None):
    inputs = testing.make_inputs(problem, "cuda") if inputs is None else inputs
    gradients = testing.make_gradients(problem, inputs)
    return testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, number):
    problem = SHAPES[name].replace(**NUMBERS[number])
    if layer_pairs.room_for_two(problem, Device.probe("cuda"), backward=True) is None:
        pytest.skip("two layers have no room on this device")
    testing.check_kernel(persistent, problem, "cuda")


@pytest.mark.parametrize("number", NUMBERS)
def test_same_bits_in_every_run(number):
    problem = SHAPES["four-layers"].replace(**NUMBERS[number])
    inputs = testing.make_inputs(problem, "cuda")
    first = run(problem, inputs)
    for _ in range(4):
        assert all(torch.equal(value, first[name]) for name, value in run(problem, inputs).items())


def test_one_launch_takes_both(monkeypatch):
    taken = []
    for name in ("forward_pass", "backward_pass"):
        real = getattr(launches, name)

        def counted(*given, name=name, real=real, between=None, **more):
            taken.extend([name] if between else [])
            real(*given, between=between, **more)

        monkeypatch.setattr(launches, name, counted)
    run(STACK.replace(num_layers=3, dtype=torch.bfloat16))
    assert taken == ["forward_pass", "backward_pass"]


def test_inference_equals_training():
    problem = SHAPES["three-layers"].replace(dtype=torch.bfloat16)
    inputs = testing.make_inputs(problem, "cuda")
    inferred = persistent.forward(problem.replace(needs_grad=False), inputs)
    trained = persistent.forward(problem, inputs)
    assert all(torch.equal(*both) for both in zip(inferred[:3], trained[:3], strict=True))


@pytest.mark.parametrize("number", ["bfloat16", "TF32"])
@pytest.mark.parametrize("hidden", [256, 650])
def test_peak_is_as_predicted(hidden, number):
    problem = Problem(100, 40, 64, hidden, num_layers=2, needs_grad=True, captured=True, **NUMBERS[number])
    device = Device.probe("cuda")
    inputs = testing.make_inputs(problem, "cuda")
    gradients = testing.make_gradients(problem, inputs)
    call = functools.partial(testing.run_kernel, persistent, problem, inputs, gradients)
    call()  # learns how much scratch memory there must be
    stated = cost.peak_bytes(persistent, problem, device)
    assert 0.9 <= stated / peak_memory(call, "cuda") <= 1.1


@pytest.mark.parametrize("weight", [0, 1, 4, 5])
def test_nan_comes_out_as_nan(weight):
    """The pattern that means "not yet written" is itself a NaN: it must travel as another one."""
    problem = STACK.replace(dtype=torch.bfloat16)
    inputs = testing.make_inputs(problem, "cuda")
    inputs.weights[weight].view(torch.int16).view(-1)[3] = -1
    found = run(problem, inputs)
    assert found["y"].isnan().any()
    assert found["dx"].isnan().any()
    again = run(problem)
    assert not any(value.isnan().any() for value in again.values())

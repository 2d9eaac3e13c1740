"""Float16 factors of the products after the loop, on the CPU: gradients agree with float64, and it saves time."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, LSTM, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.factors import choice
from gatewise.kernels.persistent import dry_run
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import exactness, half_operands, layer_pairs
from tests.kernels.factors.half_factors import widened
from tests.kernels.persistent.sources_on_cpu import launch_on_cpu

DEVICE = Device.named("a100").replace(multiprocessors=6)  # as in test_sources_on_cpu
H200 = Device.named("h200")
RAGGED = {"layout": Layout.DEVICE_LENGTHS}
PROBLEM = Problem(6, 9, 5, 8, dtype=torch.float32, needs_grad=True, allow_tf32=True)


@pytest.fixture
def sources(monkeypatch):
    """Run the sources on the CPU, with float16 factors."""
    monkeypatch.setattr(deep_products, "mm", functools.partial(widened, deep_products.mm))
    monkeypatch.setattr(half_operands, "uses_halves", lambda problem, features, device, *, x, weights: x or weights)
    for limit in ("_UNROUNDED_HIDDEN", "_SMALL_HIDDEN"):  # so that small layers round, too
        monkeypatch.setattr(exactness, limit, 0)
    return launch_on_cpu(monkeypatch, DEVICE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "num_layers": 2, **RAGGED},
        {"bidirectional": True, "resets": True, **RAGGED},
        {"bidirectional": True, "hidden_size": 13, "input_size": 31, "cell": GRU(), "bias": False},
        {"hidden_size": 16, "cell": GRU()},
        {"bidirectional": True, "proj_size": 3, **RAGGED},
        {"input_size": 50},
        {"bidirectional": True, "input_size": 40},
        {"bidirectional": True, "input_size": 24, "traced": True},
        {"cell": Regularised(LSTM(), 0.3, (0.1, 0.2), 0.25)},
        {"time": 1},
    ],
    ids=str,
)
def test_gradients_agree_with_float64(sources, options):
    problem = PROBLEM.replace(**options)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(persistent, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < 5e-3, name
    rounded = problem.num_layers * ["recurrent_half_rows"]
    assert [name for name in sources.launched if name == "recurrent_half_rows"] == rounded


def test_layers_in_pairs(monkeypatch, sources):
    monkeypatch.setattr(layer_pairs, "stacked_cut", layer_pairs.room_for_two)
    test_gradients_agree_with_float64(sources, {"num_layers": 2, "dropout": 0.4})
    assert sources.launched.count("recurrent_backward") == 1


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(weights=False), Needs(state=False)], ids=str)
def test_what_is_not_wanted_is_left_out(sources, needs):
    problem = PROBLEM.replace(bidirectional=True)
    inputs = testing.make_inputs(problem)
    above = testing.make_gradients(problem, inputs)
    every = persistent.backward(problem, inputs, persistent.forward(problem, inputs), above, Needs())
    found = persistent.backward(problem, inputs, persistent.forward(problem, inputs), above, needs)
    for wanted, one, other in ((needs.x, [found.x], [every.x]), (needs.weights, found.weights, every.weights)):
        assert all(torch.equal(*both) if wanted else both[0] is None for both in zip(one, other, strict=True))


# The choice.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"time": 1, "batch": 2}, False),
        ({"allow_tf32": False}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"lean": True}, False),
    ],
    ids=str,
)
def test_float16_factors_are_used_where_they_save_time(changes, expected):
    problem = Problem(100, 64, 1024, 1024, dtype=torch.float32, allow_tf32=True, needs_grad=True).replace(**changes)
    assert half_operands.uses_halves(problem, 1024, H200, x=True, weights=True) is expected
    assert bool(persistent.work(problem, H200).half_flops) is expected
    assert not half_operands.uses_halves(problem, 1024, H200, x=False, weights=False)
    assert not half_operands.uses_halves(problem, 1024, Device.named("a100"), x=True, weights=True)


def test_without_products_that_widen_nothing_changes(monkeypatch):
    problem = Problem(100, 64, 1024, 1024, dtype=torch.float32, allow_tf32=True, needs_grad=True)
    monkeypatch.setattr(choice, "widens", lambda: False)
    assert not half_operands.uses_halves(problem, 1024, H200, x=True, weights=True)


def test_float16_factors_take_no_more_memory(monkeypatch):
    """They take that of the gradients, besides the input weights; copies of hidden states are no longer made."""
    problem = Problem(50, 64, 1024, 1024, dtype=torch.float32, allow_tf32=True, needs_grad=True, bidirectional=True)
    dry_run._memory_of.cache_clear()
    found = persistent.workspace_bytes(problem, H200)
    monkeypatch.setattr(half_operands, "uses_halves", lambda *given, **wanted: False)
    dry_run._memory_of.cache_clear()
    plain = persistent.workspace_bytes(problem, H200)
    dry_run._memory_of.cache_clear()
    weights = 4 * 1024 * 1024 * 2
    assert found - plain <= weights + (64 << 10)

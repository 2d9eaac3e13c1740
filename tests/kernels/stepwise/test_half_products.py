"""Float16 factors of the products after the loop, on the CPU: gradients agree with float64, and are used in TF32."""

import functools

import pytest
import torch

from gatewise import testing
from gatewise.cells import GRU, RNN, Regularised
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import Needs
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.stepwise import plan, stepwise
from gatewise.kernels.stepwise.product_layout import ProductLayout
from tests.kernels.factors.half_factors import widened
from tests.kernels.persistent.sources_on_cpu import launch_factors_on_cpu

H200 = Device.named("h200")
WIDE = Problem(50, 512, 1024, 1024, dtype=torch.float32, allow_tf32=True, needs_grad=True)
SMALL = Problem(6, 9, 5, 8, dtype=torch.float32, allow_tf32=True, needs_grad=True)


@pytest.fixture
def sources(on_cpu, monkeypatch):
    on_cpu(ProductLayout())
    monkeypatch.setattr(deep_products, "mm", functools.partial(widened, deep_products.mm))
    monkeypatch.setattr(plan, "uses_halves", lambda problem, layout, features, device, *, x, weights: x or weights)
    return launch_factors_on_cpu(monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "num_layers": 2, "layout": Layout.DEVICE_LENGTHS},
        {"bidirectional": True, "resets": True, "layout": Layout.DEVICE_LENGTHS},
        {"bidirectional": True, "input_size": 31, "cell": GRU(), "bias": False},
        {"input_size": 50, "cell": RNN()},
        {"traced": True},
        {"time": 1},
    ],
    ids=str,
)
def test_gradients_agree_with_float64(sources, options):
    problem = SMALL.replace(**options)
    inputs = testing.make_inputs(problem)
    gradients = testing.make_gradients(problem, inputs)
    found = testing.named(problem, *testing.run_kernel(stepwise, problem, inputs, gradients))
    for name, value in testing.named(problem, *testing.oracle(problem, inputs, gradients)).items():
        assert testing.relative_error(found[name], value) < 3e-3, name
    assert sources.launched.count("recurrent_half_rows") == problem.num_layers


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(weights=False), Needs(state=False)], ids=str)
def test_what_is_not_wanted_is_left_out(sources, needs):
    inputs = testing.make_inputs(SMALL)
    above = testing.make_gradients(SMALL, inputs)
    every = stepwise.backward(SMALL, inputs, stepwise.forward(SMALL, inputs), above, Needs())
    found = stepwise.backward(SMALL, inputs, stepwise.forward(SMALL, inputs), above, needs)
    for wanted, one, other in ((needs.x, [found.x], [every.x]), (needs.weights, found.weights, every.weights)):
        assert all(torch.equal(*both) if wanted else both[0] is None for both in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"hidden_size": 1020}, False),
        ({"time": 1, "batch": 64}, False),
        ({"allow_tf32": False}, False),
        ({"dtype": torch.bfloat16}, False),
        ({"proj_size": 256}, False),
        ({"cell": Regularised(GRU(), 0.3, (), 0.0)}, False),
    ],
    ids=str,
)
def test_float16_factors_are_used_where_they_save_time(changes, expected):
    problem = WIDE.replace(**changes)
    assert plan.uses_halves(problem, ProductLayout(), 1024, H200, x=True, weights=True) is expected
    assert bool(stepwise.work(problem, H200).half_flops) is expected
    assert not plan.uses_halves(problem, ProductLayout(column_major=True), 1024, H200, x=True, weights=True)
    assert not plan.uses_halves(problem, ProductLayout(), 1024, Device.named("a100"), x=True, weights=True)

"""The choice between oneDNN and PyTorch's native loop."""

import itertools

import pytest
import torch

import gatewise
from gatewise.cells import GRU
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.kernels.aten import aten, onednn, runs

CPU = Device.probe("cpu")
PROBLEM = Problem(2, 2, 512, 512)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("stack", [{}, {"num_layers": 2}, {"bidirectional": True}])
def test_the_native_loop_computes_one_step_and_onednn_many_ones(needs_grad, stack):
    for batch, size in itertools.product((1, 64), (8, 128, 1024)):
        problem = Problem(1, batch, size, size, needs_grad=needs_grad, **stack)
        choices = [onednn.is_slower(problem.replace(time=time), CPU) for time in range(1, 17)]
        assert choices[0]
        assert not any(choices[8:])
        assert choices == sorted(choices, reverse=True)  # from some number of steps on, oneDNN computes all


def test_the_time_to_convert_large_weights_pays_for_more_steps():
    small, large = (Problem(3, 1, size, size, needs_grad=True) for size in (8, 1024))
    assert not onednn.is_slower(small, CPU)
    assert onednn.is_slower(large, CPU)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"traced": True}, {"proj_size": 8}, {"cell": GRU()}],
)
def test_the_times_were_measured_for_plain_float32_alone(changes):
    assert onednn.is_slower(PROBLEM, CPU)
    assert not onednn.is_slower(PROBLEM.replace(**changes), CPU)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs PyTorch with oneDNN")
def test_the_algorithm_and_what_is_kept_are_those_of_the_choice():
    few, many = (PROBLEM.replace(time=time, needs_grad=True) for time in (2, 50))
    assert aten.algorithm(few, CPU).startswith("native loop")
    assert aten.algorithm(many, CPU).startswith("oneDNN")
    assert any(spec.dtype is torch.uint8 for spec in aten.kept(many, CPU))
    assert not any(spec.dtype is torch.uint8 for spec in aten.kept(few, CPU))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs PyTorch with oneDNN")
def test_runs_of_a_packed_batch_do_not_depend_on_the_choice():
    packed = PROBLEM.replace(layout=Layout.PACKED)
    assert not onednn.takes(packed.replace(layout=Layout.DENSE), CPU)
    assert onednn.supports(packed.replace(layout=Layout.DENSE), CPU)
    assert runs.takes(packed, CPU)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
)
def test_a_few_steps_equal_those_of_torch(options, gradients, autocast):
    torch.manual_seed(0)
    theirs, ours = torch.nn.LSTM(96, 128, **options), gatewise.LSTM(96, 128, kernel="aten", **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 2, 96)
    with torch.set_grad_enabled(gradients):
        expected = theirs(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = ours(x)
    assert found[0].dtype is (torch.bfloat16 if autocast else torch.float32)
    bounds = {"rtol": 0.02, "atol": 0.02} if autocast else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, expected, check_dtype=False, **bounds)
    if gradients:
        for y, _ in (found, expected):
            y.square().sum().backward()
        for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            tolerance = 0.05 if autocast else 1e-4
            torch.testing.assert_close(parameter.grad, other.grad, rtol=tolerance, atol=tolerance, msg=name)

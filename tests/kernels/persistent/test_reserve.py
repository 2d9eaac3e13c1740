"""`gatewise.reserve_multiprocessors`: the plans of persistent kernels leave so many multiprocessors free."""

from __future__ import annotations

import math

import pytest
import torch

import gatewise
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError
from gatewise.contract.problem import Problem
from gatewise.contract.reserve import reserved
from gatewise.kernels.persistent import persistent
from gatewise.kernels.persistent.launches.builds import launches_of
from gatewise.kernels.persistent.sizes.tilings import multiprocessors
from gatewise.selection.admit import verdict

DEVICES = ["h200", "h100", "a100"]
SHAPES = [(35, 20, 1500, 2), (35, 128, 1500, 2), (50, 256, 512, 1), (10, 64, 2048, 1), (5, 3, 31, 3), (50, 128, 512, 2)]
NUMBERS = [(torch.bfloat16, False), (torch.float32, True), (torch.float32, False)]


def refusals(problem, device):
    return verdict(persistent, problem, device).refusals


def problem_of(shape, dtype, allow_tf32, **options):
    time, batch, size, layers = shape
    return Problem(time, batch, size, size, num_layers=layers, dtype=dtype, allow_tf32=allow_tf32, **options)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("number", NUMBERS, ids=["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DEVICES)
def test_launches_leave_the_reserved_multiprocessors(name, shape, number, bidirectional):
    device = Device.named(name).replace(compiles=True)
    for count in (1, 24, 48):
        problem = problem_of(shape, *number, needs_grad=True, reserved=count, bidirectional=bidirectional)
        if refusals(problem, device):
            continue
        launches = launches_of(problem, device)
        assert launches
        for launch in launches:
            # A block fills a multiprocessor, and what is reserved may be in as many different clusters.
            blocks, split = math.prod(launch.shape.grid), launch.tiling.split
            assert blocks <= multiprocessors(device, split) - split * count
            assert blocks <= device.multiprocessors - count


def test_a_reservation_changes_the_plan_and_makes_no_step_faster():
    device = Device.named("h200").replace(compiles=True)
    whole = problem_of((35, 128, 1500, 1), torch.bfloat16, True, needs_grad=True)
    less = whole.replace(reserved=24)
    launches = [launches_of(problem, device) for problem in (whole, less)]
    assert max(math.prod(launch.shape.grid) for launch in launches[0]) > device.multiprocessors - 24
    for one, other in zip(*launches, strict=True):
        assert other.tiling.step_clocks(device) >= one.tiling.step_clocks(device)
    assert [launch.shape.grid for launch in launches[0]] != [launch.shape.grid for launch in launches[1]]
    assert "24 multiprocessors reserved" in str(less)
    assert "reserved" not in str(whole)


def test_a_plan_that_cannot_leave_room_is_refused():
    device = Device.named("h200").replace(compiles=True)
    problem = problem_of(SHAPES[0], torch.bfloat16, True, needs_grad=True)
    assert not refusals(problem, device)
    (refusal,) = refusals(problem.replace(reserved=100), device)
    assert "32 multiprocessors that are left of 132 have" in str(refusal)
    for count in (132, 1000):
        assert refusals(problem.replace(reserved=count), device)


def test_the_decision_follows_the_innermost_block():
    layer = gatewise.LSTM(1500, 1500, 2)
    arguments = {"device": "h200", "dtype": torch.bfloat16, "training": True}
    with gatewise.reserve_multiprocessors(24):
        assert gatewise.explain(layer, (35, 20, 1500), **arguments).problem.reserved == 24
        with gatewise.reserve_multiprocessors(132):
            found = gatewise.explain(layer, (35, 20, 1500), **arguments)
            assert found.chosen != "persistent"
            assert "0 multiprocessors that are left of 132" in str(found)
        assert reserved() == 24
    assert gatewise.explain(layer, (35, 20, 1500), **arguments).problem.reserved == 0


def test_calls_on_a_cpu_reserve_nothing():
    layer, x = gatewise.LSTM(4, 8), torch.randn(5, 2, 4)
    with gatewise.reserve_multiprocessors(24):
        y, _ = layer(x)
        assert gatewise.explain(layer, x).problem.reserved == 0
    assert torch.equal(y, layer(x)[0])


@pytest.mark.parametrize("count", [-1, 2.5, "4", True, None])
def test_a_number_that_is_none_is_refused(count):
    with (
        pytest.raises(ArgumentError, match="`count` must be an integer of 0 or more"),
        gatewise.reserve_multiprocessors(count),
    ):
        pass

"""`gatewise.for_data_parallel`: backward passes of `persistent` leave multiprocessors free where the weights fit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import gatewise
from gatewise.contract.data_parallel import reserved
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent import persistent
from gatewise.kernels.persistent.launches.builds import launches_of
from gatewise.selection.admit import verdict
from tests.pairwise import each_value

DEVICES = ["h200", "a100"]
SHAPES = [(35, 20, 1500, 2), (35, 128, 1500, 2), (50, 256, 512, 1), (10, 64, 2048, 1), (5, 3, 31, 3), (50, 128, 512, 2)]
NUMBERS = [(torch.bfloat16, False), (torch.float32, True), (torch.float32, False)]


def problem_of(shape, dtype=torch.bfloat16, allow_tf32=True, **options):
    time, batch, size, layers = shape
    return Problem(
        time, batch, size, size, num_layers=layers, dtype=dtype, allow_tf32=allow_tf32, needs_grad=True, **options
    )


def blocks_of(problem, device):
    return {launch.tiling.backward: math.prod(launch.shape.grid) for launch in launches_of(problem, device)}


@pytest.mark.parametrize(
    ("number", "shape", "name"), each_value([*itertools.product(NUMBERS, SHAPES, DEVICES)]), ids=str
)
def test_backward_passes_leave_multiprocessors_free_or_need_all(name, shape, number):
    device = Device.named(name).replace(compiles=True)
    whole = problem_of(shape, *number)
    if verdict(persistent, whole, device).refusals:
        return
    all_of_them = blocks_of(whole, device)
    for count in (1, 24, 48, 1000):
        found = blocks_of(whole.replace(reserved=count), device)
        assert found.get(False) == all_of_them.get(False), "the forward pass"
        assert found[True] <= max(1, device.multiprocessors - count) or found[True] == all_of_them[True]


def backward_tilings(shape):
    device, problem = Device.named("h200").replace(compiles=True), problem_of(shape)
    return device, *(
        next(launch.tiling for launch in launches_of(each, device) if launch.tiling.backward)
        for each in (problem, problem.replace(reserved=24))
    )


def test_a_wide_language_model_leaves_room_by_itself():
    device, whole, less = backward_tilings((35, 20, 1500, 1))
    assert whole == less
    assert less.blocks * less.together <= device.multiprocessors - 24


def test_a_pass_that_would_use_all_leaves_room_in_little_more_time():
    device, whole, less = backward_tilings((100, 64, 1024, 1))
    assert whole.blocks * whole.together > device.multiprocessors - 24
    assert less.blocks * less.together <= device.multiprocessors - 24
    assert whole.step_clocks(device) <= less.step_clocks(device) < 1.25 * whole.step_clocks(device)


def test_the_decision_follows_the_innermost_block():
    layer = gatewise.LSTM(64, 64)
    arguments = {"device": "h200", "dtype": torch.bfloat16, "training": True}

    def left():
        return gatewise.explain(layer, (35, 20, 64), **arguments).problem.reserved

    with gatewise.for_data_parallel():
        assert left() == 24
        with gatewise.for_data_parallel(7):
            assert left() == 7
            assert "7 multiprocessors left free" in str(gatewise.explain(layer, (35, 20, 64), **arguments))
        assert reserved() == 24
    assert left() == 0


def test_calls_on_a_cpu_leave_nothing_free():
    layer, x = gatewise.LSTM(4, 8), torch.randn(5, 2, 4)
    with gatewise.for_data_parallel():
        assert gatewise.explain(layer, x).problem.reserved == 0

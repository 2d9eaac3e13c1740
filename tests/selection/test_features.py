"""The numbers that describe a call among the measured ones."""

import pytest
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.selection import kernel_named, points
from gatewise.selection.features import features

H200 = Device.named("h200")
STEPS, ALL_STEPS = "slow products of steps", "slow products over all steps"


def found(problem, kernel="stepwise"):
    return features(kernel_named(kernel).work(problem, H200), problem, H200)


def layer(time, batch, width, hidden, **options):
    return Problem(time, batch, width, hidden, needs_grad=True, captured=True, **options)


def test_few_rows_of_exact_float32_are_slow_where_there_are_columns_enough():
    float32 = {"dtype": torch.float32, "allow_tf32": False}
    assert found(layer(90, 8, 128, 128, **float32))[STEPS] == 1
    assert found(layer(90, 8, 128, 64, **float32))[STEPS] == 0  # too few columns
    assert found(layer(90, 8, 128, 256, **float32))[STEPS] == 0  # too many terms
    assert found(layer(90, 17, 128, 128, **float32))[STEPS] == 0  # too many rows
    assert found(layer(90, 8, 128, 128, dtype=torch.float16))[STEPS] == 0
    assert found(layer(8, 1, 128, 64, **float32))[ALL_STEPS] == 1
    assert found(layer(8, 1, 128, 64, num_layers=2, **float32))[ALL_STEPS] == 0.5
    assert found(layer(8, 3, 128, 64, **float32))[ALL_STEPS] == 0


def test_calls_with_slow_products_take_longer_than_others_of_these_sizes():
    ratios = {0: [], 1: []}
    for point in points.points(H200.name):
        problem = point.problem
        alike = problem.time > 1 and problem.num_directions == 1 and 2 <= problem.batch <= 64
        # `stepwise` and `persistent` avoid these products.
        if point.kernel == "aten" and problem.needs_grad and alike and 65 <= problem.hidden_size <= 192:
            own = features(point.work, problem, point.record.device)
            if own["exact float32"]:
                ratios[own[STEPS]].append(point.graph / point.work.launches)
    assert min(len(each) for each in ratios.values()) >= 5
    assert min(ratios[1]) > 1.4 * max(ratios[0])


@pytest.mark.parametrize(
    ("hidden", "batch", "tiled"), [(96, 8, True), (96, 9, False), (100, 8, False), (104, 16, True)]
)
def test_multiples_of_8_count_in_float16(hidden, batch, tiled):
    problem = layer(20, batch, 64, hidden, dtype=torch.float16)
    assert found(problem)["float16 in multiples of 8"] == tiled
    assert not found(problem.replace(dtype=torch.bfloat16))["float16 in multiples of 8"]


def test_products_of_rows_that_are_not_aligned_count_by_their_share():
    aligned, wide, narrow = (found(layer(50, 64, width, 512, dtype=torch.bfloat16)) for width in (1024, 1020, 60))
    name = "share of products of input rows not aligned"
    assert aligned[name] == 0 < narrow[name] < wide[name] < wide["share of products"]
    unaligned = found(layer(50, 64, 1024, 500, dtype=torch.bfloat16))
    assert 0 < unaligned["share of products of hidden rows not aligned"] < unaligned["share of products"]
    assert aligned["share of products of hidden rows not aligned"] == 0


def test_hidden_units_of_one_tile_are_alike():
    name = "log tiles of 32 hidden units"
    problems = [layer(50, 4, 64, hidden, dtype=torch.float16) for hidden in (33, 64, 65)]
    first, second, third = (found(problem, "cudnn")[name] for problem in problems)
    assert first == second < third

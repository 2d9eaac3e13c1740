"""Layouts, tilings and predicted times, on devices that this machine does not have."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from gatewise.cells import GRU, RNN, CappedLSTM
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.stepwise import stepwise
from gatewise.kernels.stepwise.padding import padded
from gatewise.kernels.stepwise.plan import (
    FEWEST_STEPS,
    held_bytes,
    memory_bytes,
    product_layout_of,
    product_layouts,
    rank,
    runs_of,
    starts_early,
)
from gatewise.kernels.stepwise.product_layout import THREADS, ProductLayout, tiling
from gatewise.kernels.stepwise.recording import key_of
from gatewise.selection import cost
from tests.pairwise import each_value, one_in

H200 = Device.named("h200")
WIDE = Problem(50, 256, 1024, 1024, dtype=torch.bfloat16, needs_grad=True)
RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "layouts.jsonl"
ROWS = json.loads(RECORD.read_text().splitlines()[-1])["rows"]
NAMED = {
    "nmt_encoder": Problem(50, 128, 512, 512, num_layers=2, bidirectional=True),
    "ptb_large": Problem(35, 20, 1500, 1500, num_layers=2),
}


def problem_of(row):
    name, precision = row["case"], row["precision"]
    if name in NAMED:
        shape = NAMED[name]
    else:
        time, batch, size = map(int, name.split(","))
        shape = Problem(time, batch, size, size)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return shape.replace(dtype=dtype, allow_tf32=precision == "tf32", needs_grad=row["mode"] == "training")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}-{row['precision']}-{row['mode']}")
def test_predicts_within_a_quarter_of_what_was_measured(row):
    problem = problem_of(row)
    problem = problem.replace(captured=True, announced=True)  # as the record was: under a CUDA graph
    if padded(problem, H200) is not None:
        pytest.skip("the record has the times of sizes as they are")
    work = stepwise.work(problem, H200)
    predicted = cost.seconds(stepwise.name, work, problem, H200) / problem.time * 1e6
    assert 0.75 <= predicted / row["microseconds_a_step"]["chosen"] <= 1.25


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}-{row['precision']}-{row['mode']}")
def test_the_chosen_form_is_near_the_best_that_was_measured(row):
    times = row["microseconds_a_step"]
    assert times["chosen"] <= 1.25 * min(time for name, time in times.items() if "row" in name or "column" in name)


def test_the_form_is_the_one_that_ranks_first_and_named():
    chosen = product_layout_of(WIDE, H200)
    assert rank(WIDE, H200, chosen) == min(rank(WIDE, H200, layout) for layout in product_layouts(WIDE))
    assert "row-major" in stepwise.algorithm(WIDE, H200)
    assert "one product per gate" in stepwise.algorithm(WIDE, H200)
    assert "column-major" in str(ProductLayout(column_major=True))


def test_precision_decides_between_forms():
    exact = WIDE.replace(dtype=torch.float32)
    assert product_layout_of(exact, H200).split_k == 1
    assert product_layout_of(exact.replace(allow_tf32=True), H200).transposed_backward
    assert not product_layout_of(WIDE, H200).transposed_backward


def test_launches_start_early_beside_long_products_only():
    in_tf32 = WIDE.replace(dtype=torch.float32, allow_tf32=True)
    assert starts_early(in_tf32, H200)
    assert not starts_early(in_tf32.replace(hidden_size=512), H200)
    assert not starts_early(WIDE, H200)


def test_compiled_calls_and_projections_keep_to_rows():
    assert any(layout.column_major for layout in product_layouts(WIDE))
    assert not any(layout.column_major for layout in product_layouts(WIDE.replace(traced=True)))
    assert product_layouts(WIDE.replace(proj_size=8)) == [ProductLayout()]


@pytest.mark.parametrize(
    ("sizes", "element_bytes"),
    each_value(
        [*itertools.product([(1, 1), (3, 31), (256, 1024), (128, 512), (64, 2048), (1000, 6), (7, 8)], [2, 4, 8])]
    ),
    ids=str,
)
def test_a_tiling_covers_every_element_once(sizes, element_bytes):
    outer, inner = sizes
    width, lanes, (rows, columns, directions) = tiling(outer, inner, 2, element_bytes, 132)
    assert inner % width == 0
    assert width * element_bytes <= 16
    assert THREADS % lanes == 0
    assert outer <= rows * (THREADS // lanes) < outer + THREADS // lanes
    assert inner <= columns * lanes * width
    assert (columns - 1) * lanes * width < inner
    assert directions == 2


@pytest.mark.parametrize("time", [*one_in(6, range(1, 70)), 1000])
def test_runs_make_up_the_steps(time):
    assert sum(runs_of(time)) == time
    assert len(runs_of(time)) <= time // 32 + 5


def test_memory_grows_with_weights_and_rows_but_not_with_steps():
    assert memory_bytes(WIDE) == memory_bytes(WIDE.replace(time=5000))
    assert memory_bytes(WIDE) > 8 << 20  # at least the copy of the weights
    assert memory_bytes(WIDE.replace(bidirectional=True)) == 2 * memory_bytes(WIDE)


def test_what_is_recorded_is_held_between_calls():
    assert stepwise.work(WIDE, H200).held_bytes == held_bytes(WIDE) == memory_bytes(WIDE)
    for changes in ({"time": FEWEST_STEPS - 1}, {"proj_size": 8}, {"captured": True}):
        assert held_bytes(WIDE.replace(**changes)) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"cell": GRU()},
        {"cell": RNN("relu")},
        {"cell": CappedLSTM()},
        {"batch": 257},
        {"hidden_size": 1025},
        {"bidirectional": True},
        {"dtype": torch.float16},
        {"allow_tf32": True},
    ],
    ids=str,
)
def test_captured_steps_are_replayed_only_for_calls_that_launch_the_same_work(change):
    known = key_of("forward", WIDE.replace(cell=RNN("tanh")), ProductLayout())
    assert key_of("forward", WIDE.replace(cell=RNN("tanh")), ProductLayout()) == known
    assert key_of("forward", WIDE.replace(**{"cell": RNN("tanh"), **change}), ProductLayout()) != known

"""The page on measuring a GPU states what the records of predictions and the packaged times say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import other_gpus
from gatewise.contract.device import Device
from gatewise.selection import kernel_named, points

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "benchmarks" / "results" / "predictions.jsonl").read_text("utf-8").splitlines()
FIRST = 20261207  # the seed of the first run with predictions of the present form
RUNS = [row for row in map(json.loads, LINES) if "summary" in row and row["seed"] >= FIRST]
PAGE = " ".join((ROOT / "docs" / "how-to" / "tune-a-gpu.md").read_text("utf-8").split())

# The commits of calls whose products by warpgroups were measured.
WARPGROUPS = (
    "1c2be71",
    "c0ccf07",
    "3fcec88",
    "954331b",
    "c851202",
    "b2555d2",
    "6a821fd",
    "5af8c65",
    "c418a58",
    "4637253",
    "dbf9f4d",
    "0bdb130",
    "0c2cd24",
    "246c123",
    "1a533e8",
    "2d2488c",
    "d4805ea",
    "3bac18b",
    "fcb52b1",
    "6777670",
)
# The commits of calls whose gradients by float16 products were measured.
HALVES = "c06559b", "470f1e8", "7164508", "f8988ef", *WARPGROUPS[1:]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run["seed"]))
def test_a_run_has_its_row(run):
    shares, device = run["summary"], run["run"]["device"].split()[1]
    every, chosen, choices = shares["predicted"]["all"], shares["predicted"]["chosen"], shares["choices"]
    assert (
        f"| {device}, {run['seed']}, {shares['shapes']} | {100 * every['within']:.1f} % of {every['calls']} "
        f"| {100 * chosen['within']:.1f} % | {100 * choices['within']:.1f} % | {choices['worst'][0]:.2f} |"
    ) in PAGE


def slow_choices(accepts):
    """Return the calls of runs whose chosen kernel takes over 15 % longer than the fastest, with the ratio, and all."""
    rows = [row for row in map(json.loads, LINES) if "summary" not in row and accepts(row["seed"])]
    ratios = [
        row["kernels"][row["chosen"]]["seconds"] / min(each["seconds"] for each in row["kernels"].values())
        for row in rows
    ]
    return [(row, ratio) for row, ratio in zip(rows, ratios, strict=True) if ratio > 1.15], rows


def test_choices_that_are_slow_are_counted():
    slow, rows = slow_choices(lambda seed: seed >= FIRST)
    ratios = [ratio for _, ratio in slow]
    assert len(slow) == 5
    assert f"Of the {len(rows)} choices of these runs, five took over 15 % longer than the fastest kernel" in PAGE
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as long as it." in PAGE
    steps = [row["sizes"][0] for row, _ in slow]
    assert max(steps) == 16
    assert steps.count(1) == 2


def test_choices_of_single_steps_that_are_slow_are_counted():
    slow, rows = slow_choices(lambda seed: seed in {20261203, 20261205})
    assert all(row["sizes"][0] == 1 for row in rows)
    assert f"{len(slow)} of {len(rows)} choices took over 15 % longer" in PAGE


def test_times_that_are_older_than_the_kernels_are_counted():
    def halves(name):
        found = [each for each in points.points(Device.named(name).name) if each.kernel == "persistent"]
        return [each for each in found if each.problem.needs_grad and each.work.half_flops]

    again, older = {}, {}
    for name in ("h200", "h100"):
        found = halves(name)
        again[name] = sum(each.record.commit in HALVES for each in found)
        older[name] = len(found) - again[name]
    assert older["h200"] == 0
    assert (
        f"all {again['h200']} on an H200 were measured with these products, and {again['h100']} on an H100; the other "
        f"{older['h100']} on an H100 were measured with TF32 products"
    ) in PAGE


@pytest.mark.parametrize("name", ["h100", pytest.param("h200", marks=pytest.mark.exhaustive)])
def test_no_time_is_older_than_products_by_warpgroups(name):
    persistent, device = kernel_named("persistent"), Device.named(name)
    earlier = [each for each in points.points(device.name) if each.record.commit[:7] not in WARPGROUPS]
    found = {each.problem for each in earlier if each.kernel == "persistent"}
    # No other calls have blocks of enough rows.
    found = [each for each in found if each.element_bytes == 2 and each.batch * each.num_directions >= 64]
    assert not [each for each in found if "by warpgroups" in persistent.algorithm(each, device)]


def test_predictions_for_a_gpu_without_measured_calls_are_as_the_record_says():
    rows = map(json.loads, (ROOT / "benchmarks" / "results" / "other_gpus.jsonl").read_text("utf-8").splitlines())
    found = {(row["kernel"], row["pass"]): row for row in rows}
    for kernel in ("persistent", "stepwise", "cudnn", "aten", "eager"):
        ways = [(step, how) for step in ("training", "inference") for how in ("CUDA graph", "called from Python")]
        shares = [found[kernel, step][how] for step, how in ways]
        cells = [f"{100 * each['prediction']:.0f} % ({100 * each['estimate']:.0f} %)" for each in shares]
        assert f"| `{kernel}` | {' | '.join(cells)} |" in PAGE


def test_the_record_of_another_gpu_is_of_the_packaged_calls():
    row = other_gpus.row("eager", False, *[Device.named(name).name for name in ("h200", "h100")])
    lines = (ROOT / "benchmarks" / "results" / "other_gpus.jsonl").read_text("utf-8").splitlines()
    (recorded,) = [old for old in map(json.loads, lines) if (old["kernel"], old["pass"]) == ("eager", "inference")]
    assert row == recorded

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
RUNS = [row for row in map(json.loads, LINES) if "summary" in row]
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


def test_predictions_of_cudnn_are_counted():
    *first, fourth, fifth, sixth, seventh = (run["summary"]["predicted"] for run in RUNS[:7])
    wrong = [{name: round(each["calls"] * (1 - each["within"])) for name, each in run.items()} for run in first]
    assert sum(run["cudnn"] for run in wrong) > sum(run["all"] for run in wrong) / 2
    assert fourth["cudnn"]["within"] == 1
    assert f"all {fourth['cudnn']['calls']} predictions of cuDNN were within 25 %" in PAGE
    assert f"Of the {fifth['cudnn']['calls']} in the fifth run, {100 * fifth['cudnn']['within']:.1f} % were" in PAGE
    assert f"of the {sixth['cudnn']['calls']} in the sixth one {100 * sixth['cudnn']['within']:.1f} %" in PAGE
    assert f"of the {seventh['cudnn']['calls']} in the seventh one {100 * seventh['cudnn']['within']:.1f} %." in PAGE


def test_calls_that_would_be_faster_on_another_kernel_are_counted():
    rows = [row for row in map(json.loads, LINES) if row["seed"] in {20261129, 20261130} and "summary" not in row]
    slower = [
        row
        for row in rows
        if row["kernels"][row["chosen"]]["seconds"] > 1.15 * min(each["seconds"] for each in row["kernels"].values())
    ]
    assert {(row["sizes"][0], row["chosen"]) for row in slower} == {(1, "aten")}
    assert (len(rows), len(slower)) == (400, 3)
    assert (
        "Of the 400 calls of the sixth and seventh run, three took over 15 % longer than on the fastest kernel." in PAGE
    )


def test_single_steps_that_would_be_faster_on_another_kernel_are_counted():
    rows = [row for row in map(json.loads, LINES) if row["seed"] in {20261203, 20261205} and "summary" not in row]
    assert all(row["sizes"][0] == 1 for row in rows)
    slower = [
        row
        for row in rows
        if row["kernels"][row["chosen"]]["seconds"] > 1.15 * min(each["seconds"] for each in row["kernels"].values())
    ]
    assert f"of the {len(rows)} choices, {len(slower)} took over 15 % longer than the fastest kernel" in PAGE


def test_choices_among_calls_of_all_lengths_are_counted():
    rows = [row for row in map(json.loads, LINES) if row["seed"] == 20261207 and "summary" not in row]
    seconds = [{name: each["seconds"] for name, each in row["kernels"].items()} for row in rows]
    slower = [
        (row, own) for row, own in zip(rows, seconds, strict=True) if own[row["chosen"]] > 1.15 * min(own.values())
    ]
    assert f"Of the {len(rows)} choices of the eleventh, two took over 15 % longer than the fastest kernel" in PAGE
    (single, of_single), (exact, _) = slower
    assert single["sizes"] == [1, 144, 136, 159, 1]
    assert f"cuDNN takes {1e6 * of_single['cudnn']:.0f} us and was expected" in PAGE
    assert round(1e6 * single["kernels"]["cudnn"]["predicted"]) == 35
    assert exact["sizes"] == [9, 72, 1450, 1450, 1]
    for name in ("stepwise", "eager"):
        assert exact["kernels"][name]["seconds"] / exact["kernels"][name]["predicted"] == pytest.approx(2 / 3, abs=0.05)


def test_the_one_choice_of_three_later_runs_that_is_slow():
    rows = [row for row in map(json.loads, LINES) if 20261208 <= row["seed"] <= 20261210 and "summary" not in row]
    seconds = [{name: each["seconds"] for name, each in row["kernels"].items()} for row in rows]
    assert f"Of the {len(rows)} choices of the three runs after it, one did" in PAGE
    ((row, own),) = (
        (row, own) for row, own in zip(rows, seconds, strict=True) if own[row["chosen"]] > 1.15 * min(own.values())
    )
    assert (row["sizes"], row["chosen"], min(own, key=own.__getitem__)) == ([8, 288, 64, 64, 2], "cudnn", "persistent")
    times = "cuDNN takes {:.0f} us, {:.2f} times as long as `persistent`"
    assert times.format(1e6 * own["cudnn"], own["cudnn"] / own["persistent"]) in PAGE
    assert f"expected to take {1e6 * row['kernels']['cudnn']['predicted']:.0f}." in PAGE


def the_slow_choice(seed):
    """Return the only shape of a run whose chosen kernel takes over 15 % longer than the fastest, and its times."""
    rows = [row for row in map(json.loads, LINES) if row["seed"] == seed and "summary" not in row]
    seconds = [{name: each["seconds"] for name, each in row["kernels"].items()} for row in rows]
    (found,) = (
        (row, own) for row, own in zip(rows, seconds, strict=True) if own[row["chosen"]] > 1.15 * min(own.values())
    )
    return *found, len(rows)


def test_the_one_choice_of_the_fifteenth_run_that_is_slow():
    row, own, count = the_slow_choice(20261215)
    assert f"One of the {count} choices took over 15 % longer than the fastest kernel" in PAGE
    assert row["sizes"] == [16, 32, 312, 40, 1]
    told = "`persistent` takes {:.0f} us, {:.2f} times as long as cuDNN."
    assert told.format(1e6 * own["persistent"], own["persistent"] / own["cudnn"]) in PAGE
    (stepwise,) = [run["summary"]["predicted"]["stepwise"] for run in RUNS if run["seed"] == 20261215]
    assert stepwise["within"] == 1
    assert f"all {stepwise['calls']} predictions of it were within 25 %" in PAGE


def test_the_one_choice_of_the_sixteenth_run_that_is_slow():
    row, own, count = the_slow_choice(20261220)
    assert f"Of the {count} choices of the run after it one did, too" in PAGE
    assert (row["sizes"], row["precision"], min(own, key=own.get)) == ([1, 24, 1604, 832, 1], "bf16", "aten")
    told = "where cuDNN takes {:.0f} us, {:.2f} times as long as `aten`, and was expected to take {:.0f}."
    expected = row["kernels"]["cudnn"]["predicted"]
    assert told.format(1e6 * own["cudnn"], own["cudnn"] / own["aten"], 1e6 * expected) in PAGE


def test_times_that_are_older_than_the_kernels_are_counted():
    def halves(name):
        found = [each for each in points.points(Device.named(name).name) if each.kernel == "persistent"]
        return [each for each in found if each.problem.needs_grad and each.work.half_flops]

    again, older = {}, {}
    for name in ("h200", "h100"):
        found = halves(name)
        again[name] = sum(each.record.commit in HALVES for each in found)
        older[name] = len(found) - again[name]
    assert (
        f"{again['h200']} were measured with these products on an H200 and {again['h100']} on an H100; the other "
        f"{older['h200']} and {older['h100']} were measured with TF32 products"
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

"""The figures about calls of one step on the page on kernels are those of the measured calls."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

from gatewise.benchmarks.lstm.record import GRAPH, LayerRecord, newest
from gatewise.benchmarks.record import read_lines
from gatewise.cells import GRU, LSTM
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.stepwise.single_criteria import is_single_call, is_single_training, is_tiled
from gatewise.selection import points

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/kernel-internals.md"


def measured():
    """Return the times of calls of one step that `stepwise` computes in one launch for each layer, by kernel."""
    found, device = defaultdict(dict), Device.named("h200")
    for point in points.points(device.name):
        if "with single steps" in point.record.name and is_single_call(point.problem, device):
            found[point.problem][point.kernel] = point.graph
    return found


def test_the_page_compares_one_launch_for_each_layer_with_other_kernels():
    ratios = {
        problem: min(seconds for name, seconds in times.items() if name != "stepwise") / times["stepwise"]
        for problem, times in measured().items()
    }
    text = " ".join(PAGE.read_text("utf-8").split())
    few = [ratio for problem, ratio in ratios.items() if problem.batch <= 8]
    many = [ratio for problem, ratio in ratios.items() if problem.batch > 8]
    tiled = [
        ratio
        for problem, ratio in ratios.items()
        if problem.batch <= 8 and is_tiled(problem.cell, problem.element_bytes, problem.input_size, problem.hidden_size)
    ]
    for kind, own in (("up to 8 sequences", few), ("9 to 64 sequences", many)):
        faster = sum(ratio > 1 for ratio in own)
        mean = math.exp(sum(map(math.log, own)) / len(own))
        row = f"| {kind} | {len(own)} | {faster} | {mean:.2f} | {min(own):.2f} |"
        assert row in text, row
    mean = math.exp(sum(map(math.log, tiled)) / len(tiled))
    assert f"compute {len(tiled)} of the calls of up to 8 sequences, whose mean is {mean:.2f}." in text


def test_the_page_and_the_changelog_compare_one_step_with_pytorch():
    spans, commits = {}, set()
    for name, rival in (("gru_one_step", "nn.GRU"), ("lstm_one_step", "nn.LSTM")):
        every = newest(read_lines(ROOT / "benchmarks/results" / f"{name}.jsonl", LayerRecord))
        rows = [row for row in every if row.case.startswith("decode_1_") and row.direction == "inference"]
        assert {row.ran_captured for row in rows} == {"stepwise"}
        assert len(rows) == 8
        ratios = [row.times[GRAPH][rival].median / row.times[GRAPH]["gatewise"].median for row in rows]
        spans[rival] = f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as `torch.{rival}`"
        commits |= {row.run.commit for row in rows}
    assert len(commits) == 1
    page = " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())
    assert all(span in page for span in spans.values()), spans
    for name in ("CHANGELOG.md", "README.md"):
        assert spans["nn.LSTM"] in " ".join((ROOT / name).read_text("utf-8").split())


def of_training():
    """Return the times of training calls of one step that were drawn at random, by kernel, as far as they are new."""
    found, device = {}, Device.named("h200")
    for line in (ROOT / "benchmarks/results/single_steps.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if "seed" in row:
            dtype, tf32 = points.PRECISIONS[row["dtype"]]
            sizes = {name: row[name] for name in ("batch", "input_size", "hidden_size", "num_layers")}
            cell = {"lstm": LSTM(), "gru": GRU()}[row["cell"]]
            problem = Problem(1, **sizes, dtype=dtype, allow_tf32=tf32, cell=cell, needs_grad=True)
            if is_single_training(problem, device):
                found[problem] = row["us"]
    return found


def test_the_page_compares_training_calls_with_other_kernels():
    text, every = " ".join(PAGE.read_text("utf-8").split()), of_training()
    for kind, many in (("up to 8 sequences", False), ("9 to 64 sequences", True)):
        own = [
            min(us for name, us in times.items() if name != "stepwise") / times["stepwise"]
            for problem, times in every.items()
            if (problem.batch > 8) == many
        ]
        mean = math.exp(sum(map(math.log, own)) / len(own))
        assert f"| {kind} | {len(own)} | {sum(each > 1 for each in own)} | {mean:.2f} | {min(own):.2f} |" in text


def test_the_changelog_compares_known_training_calls_with_their_times_before():
    lines = (ROOT / "benchmarks/results/single_steps.jsonl").read_text("utf-8").splitlines()
    times = [row["us"] for row in map(json.loads, lines) if "before" in row.get("us", ())]
    ratio = statistics.median(us["stepwise"] / us["before"] for us in times)
    text = " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())
    assert f"{len(times)} measured calls take {ratio:.2f} of their time before" in text


def test_the_page_compares_training_calls_of_grus_with_products_in_parts():
    lines = (ROOT / "benchmarks/results/single_steps.jsonl").read_text("utf-8").splitlines()
    times = [row["us"] for row in map(json.loads, lines) if "in parts" in row.get("us", ())]
    ratios = [us["stepwise"] / us["in parts"] for us in times]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    span = f"take {min(ratios):.2f} to {max(ratios):.2f} of the time in the table (geometric mean {mean:.2f})"
    assert f"{len(times)} of the calls of 9 to 64 sequences {span}" in " ".join(PAGE.read_text("utf-8").split())


def test_pages_compare_training_of_one_step_with_pytorch():
    every = newest(read_lines(ROOT / "benchmarks/results/lstm.jsonl", LayerRecord))
    rows = [
        row for row in every if row.case.startswith("decode_1_") and row.direction == "train" and row.kernel == "auto"
    ]
    assert {row.ran_captured for row in rows} == {"stepwise"}
    assert len(rows) == 8
    ratios = [row.times[GRAPH]["nn.LSTM"].median / row.times[GRAPH]["gatewise"].median for row in rows]
    span = f"{min(ratios):.1f} to {max(ratios):.1f} times as fast"
    assert f"its forward and backward pass are {span}" in " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"trains {span} as with `torch.nn.LSTM`" in " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())

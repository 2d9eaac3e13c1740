"""The figures about calls of one step on the page on kernels are those of the measured calls."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

from gatewise.benchmarks.lstm.record import GRAPH, LayerRecord, newest
from gatewise.benchmarks.record import read_lines
from gatewise.contract.device import Device
from gatewise.selection import points

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/kernel-internals.md"


def measured():
    found = defaultdict(dict)
    for point in points.points(Device.named("h200").name):
        if "with single steps" in point.record.name:
            found[point.problem][point.kernel] = point.graph
    return found


def test_the_page_compares_one_launch_for_each_layer_with_other_kernels():
    found = measured()
    ratios = {
        problem: min(seconds for name, seconds in times.items() if name != "stepwise") / times["stepwise"]
        for problem, times in found.items()
    }

    def mean(least, most):
        own = [ratio for problem, ratio in ratios.items() if least <= problem.batch <= most]
        return f"{math.exp(sum(map(math.log, own)) / len(own)):.2f}"

    text = " ".join(PAGE.read_text("utf-8").split())
    faster = sum(ratio > 1 for ratio in ratios.values())
    assert f"Of {len(found)} such calls of LSTMs and GRUs, drawn at random" in text
    assert f"on an H200, {faster} are faster than on any other kernel" in text
    assert f"calls of up to 4 sequences take {mean(1, 4)} times as long" in text
    assert (
        f"5 to 8 sequences {mean(5, 8)} times (geometric means; the least ratio is {min(ratios.values()):.2f})" in text
    )
    assert f"The other {len(found) - faster}, mostly" in text


def test_the_page_and_the_changelog_compare_one_step_with_pytorch():
    spans, commits = {}, set()
    for name, rival in (("gru", "nn.GRU"), ("lstm_one_step", "nn.LSTM")):
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
    assert spans["nn.LSTM"] in " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())

"""The figures about calls of one step on the page on kernels are those of the measured calls."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

from gatewise.contract.device import Device
from gatewise.selection import points

PAGE = Path(__file__).parents[2] / "docs/kernel-internals.md"


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
    assert f"5 to 8 sequences {mean(5, 8)} times (geometric means; the least ratio is {min(ratios.values()):.2f})" in text
    assert f"The other {len(found) - faster}, mostly" in text

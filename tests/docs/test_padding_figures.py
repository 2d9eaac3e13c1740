"""The page on kernels states how much time rounded sizes save as the records have it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from gatewise.contract.device import Device
from gatewise.kernels.stepwise.padding import padded
from gatewise.selection import points

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/kernel-internals.md").read_text("utf-8").split())
H200 = Device.named("h200")


def lines(name):
    return [json.loads(line) for line in (ROOT / "benchmarks/results" / name).read_text("utf-8").splitlines()]


def test_the_table_of_sizes():
    rows = [row for row in lines("padded_rows.jsonl") if (row["dtype"], row["pass"]) == ("bfloat16", "training")]
    found = {(row["hidden_size"], row["batch"]): row for row in rows}
    for hidden in (260, 500, 650, 943, 1212, 1500):
        cells = [
            f"{row['plain_us'] / row['rounded_us']:.2f} ({row['persistent_us'] / row['rounded_us']:.2f})" if row else ""
            for row in (found.get((hidden, batch)) for batch in (8, 32, 128, 512))
        ]
        assert " ".join(f"| {hidden} | {' | '.join(cells)} |".split()) in PAGE


def test_the_calls_that_are_rounded_up():
    rows = lines("padded_calls.jsonl")
    ratios = {True: [], False: []}
    for row in rows:
        problem = points.problem_of({name: row[name] for name in ("sizes", "precision", "pass", "lengths")})
        ratios[padded(problem, H200) is not None].append(row["rounded_us"] / row["plain_us"])
    mean = math.exp(sum(map(math.log, ratios[True])) / len(ratios[True]))
    assert f"Of {len(rows)} measured calls" in PAGE
    told = f"are {len(ratios[True])}, which take {mean:.2f} of the time before ({min(ratios[True]):.2f} to"
    assert f"{told} {max(ratios[True]):.2f}, geometric mean)" in PAGE


def test_the_calls_that_were_measured_again_are_counted():
    found = [point for point in points.points(H200.name) if point.kernel == "stepwise"]
    again = [point for point in found if point.record.commit == "ec0336b" and padded(point.problem, H200) is not None]
    page = " ".join((ROOT / "docs/how-to/tune-a-gpu.md").read_text("utf-8").split())
    assert f"#sizes-that-are-rounded-up) | {len(again)} |" in page

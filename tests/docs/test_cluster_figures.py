"""The page on the kernels states what the exchange of values in clusters takes, as its record has it."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/kernel-internals.md").read_text("utf-8").split())


def lines(name):
    return [json.loads(line) for line in (ROOT / "benchmarks/results" / name).read_text("utf-8").splitlines()]


def geometric(ratios):
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}"


def ends(ratios):
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_whole_calls_before_and_after():
    calls = lines("clusters.jsonl")

    def ratios(accepts=lambda call: True):
        return [call["us"] / call["us_before"] for call in calls if accepts(call)]

    long = geometric(ratios(lambda call: call["sizes"][0] >= 100))
    bf16, fp16 = (geometric(ratios(lambda call, of=name: call["precision"] == of)) for name in ("bf16", "fp16"))
    every = ratios()
    assert (
        f"changes {len(every)}, which take {geometric(every)} of the time before ({ends(every)}; {long} from 100 steps "
        f"on; bfloat16 {bf16}, float16 {fp16})"
    ) in PAGE


def test_loops_in_both_ways():
    loops = {"forward": {}, "backward": {}}
    for line in lines("tilings.jsonl"):
        if "distributed" in line["tiling"]:
            loops[line["pass"]].setdefault(line["case"], []).append(line)
    told = {}
    for name, cases in loops.items():
        timed = [rows for rows in cases.values() if {row["tiling"]["distributed"] for row in rows} == {False, True}]
        told[name] = [
            min(row["us_a_step"] for row in rows if row["tiling"]["distributed"])
            / min(row["us_a_step"] for row in rows if not row["tiling"]["distributed"])
            for rows in timed
        ]
    forward, backward = told["forward"], told["backward"]
    assert len(forward) == len(backward)
    assert (
        f"In the {len(forward)} shapes that were timed in both ways, the loops of the forward pass take "
        f"{geometric(forward)} of the time ({ends(forward)}), and those of the backward pass {geometric(backward)} "
        f"({ends(backward)};"
    ) in PAGE

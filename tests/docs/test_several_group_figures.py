"""The page on the kernels states what multiplying several groups of batch rows at a time takes."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = [
    json.loads(line) for line in (ROOT / "benchmarks/results/several_groups.jsonl").read_text("utf-8").splitlines()
]
CALLS = [line for line in LINES if line["set"] == "calls"]
PAGE = " ".join((ROOT / "docs/kernel-internals.md").read_text("utf-8").split())


def geometric(ratios):
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}"


def shares(calls):
    return [call["us"] / call["us_before"] for call in calls]


def test_whole_calls_before_and_after():
    kept = [call for call in CALLS if call["kept"]]
    ratios = shares(kept)
    ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
    of = {name: geometric(shares([call for call in kept if call["precision"] == name])) for name in ("bf16", "fp16")}
    tf32 = geometric(shares([call for call in kept if call["precision"] == "tf32"]))
    told = (
        f"change {len(kept)}, which take {geometric(ratios)} of the time before ({ends}; "
        f"bfloat16 {of['bf16']}, float16 {of['fp16']}, TF32 {tf32})"
    )
    assert told in PAGE


def test_calls_whose_rows_end_at_different_steps():
    ragged = [call for call in CALLS if not call["kept"]]
    assert all("lengths" in call["call"] for call in ragged)
    assert f"{len(ragged)} calls took {geometric(shares(ragged))} of the time" in PAGE


def test_layers_in_pairs():
    ratios = {"forward": [], "backward": []}
    lines = [line for line in LINES if line["set"] == "layers in pairs" and line["tiling"]]
    for case in dict.fromkeys((line["case"], line["dtype"], line["pass"]) for line in lines):
        timed = [line for line in lines if (line["case"], line["dtype"], line["pass"]) == case]
        several, one = (
            min(line["us_a_step"] for line in timed if (line["tiling"]["eights"] > 1) == more) for more in (True, False)
        )
        ratios[case[2]].append(several / one)
    forward, backward = ratios["forward"], ratios["backward"]
    ends = [f"{min(own):.2f} to {max(own):.2f}" for own in (forward, backward)]
    assert (
        f"in {len(forward)} shapes of two layers, blocks that multiply several groups take {geometric(forward)} of the "
        f"time of the others in the forward pass ({ends[0]}) and {geometric(backward)} in the backward pass "
        f"({ends[1]})."
    ) in PAGE


def test_loops_of_narrower_layers():
    loops = {}
    for line in LINES:
        if line["set"] == "loops of narrower layers":
            loops.setdefault((line["case"], line["dtype"]), []).append(line)
    wide = {case: rows for case, rows in loops.items() if int(case[0].split("-")[1]) >= 190}
    assert all(rows[0]["rank"] == 0 and rows[0]["tiling"]["eights"] == 1 for rows in wide.values())
    ratios = [
        min(row["us_a_step"] for row in rows if row["tiling"]["eights"] > 1) / rows[0]["us_a_step"]
        for rows in wide.values()
    ]
    ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
    assert f"{len(ratios)} loops of such shapes took {geometric(ratios)} of the time ({ends})" in PAGE

"""The page on the kernels states what pauses and padded rows save, as their record has it."""

from __future__ import annotations

import collections
import json
import math
import statistics
from pathlib import Path

import pytest

from gatewise.kernels.persistent.sizes.padding import hidden_of

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/kernel-internals.md").read_text("utf-8").split())
BYTES = {"bf16": 2, "tf32": 4, "fp32": 4}


@pytest.fixture(scope="module")
def ratios():
    """Return the function that gives the ratios of the times with a pause to those before."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in (ROOT / "benchmarks/results/pauses.jsonl").read_text("utf-8").splitlines():
        own = json.loads(line)
        if own["set"] != "loops":
            continue
        found[own["dtype"], own["case"]][own["pause"]].append(own["us_a_step"])

    def of(dtype, which, pause, accepts=lambda case: True):
        return [
            statistics.fmean(own[which] for own in times[pause])
            / statistics.fmean(own[which] for own in times["before"])
            for (numbers, case), times in found.items()
            if numbers == dtype and pause in times and accepts(case)
        ]

    return of


def summary(values):
    return f"{math.exp(statistics.fmean(map(math.log, values))):.2f} ({min(values):.2f} to {max(values):.2f}"


def test_padded_rows(ratios):
    def padded(dtype):
        return lambda case: hidden_of(int(case.split("-")[2])) * BYTES[dtype] % 64 != 0

    bf16, exact = (ratios(dtype, "forward", 0, padded(dtype)) for dtype in ("bf16", "fp32"))
    assert f"In {len(bf16)} shapes in bfloat16 that this changes, forward loops take" in PAGE
    assert f"take {summary(bf16).replace(' (', ' of the time (')}) on an H200, and in {len(exact)} with" in PAGE
    assert f"exact products {summary(exact)[:4]}." in PAGE


def test_both_changes(ratios):
    bf16, tf32, exact = (ratios(dtype, "forward", "chosen") for dtype in BYTES)
    assert f"forward loops of {len(bf16)} shapes drawn at random take" in PAGE
    before = summary(bf16).replace(" (", " of the time before in bfloat16 (")
    assert f"take {before}), of {len(tf32)} in TF32 {summary(tf32)}) and of {len(exact)} with" in PAGE
    assert f"with exact products {summary(exact)})." in PAGE
    back = [summary(ratios(dtype, "backward", "chosen")) for dtype in BYTES]
    assert f"take {back[0]}), {back[1]}) and {back[2]};" in PAGE


def test_whole_calls():
    lines = map(json.loads, (ROOT / "benchmarks/results/pauses.jsonl").read_text("utf-8").splitlines())
    calls = [call["us"] / call["us_before"] for call in lines if call["set"] == "calls"]
    told = f"the {len(calls)} whose forward loops this changes most take {summary(calls)}), all products included."
    assert told.replace(" (", " of the time before (", 1) in PAGE


def test_a_sketch_with_rows_in_the_order_of_the_loads():
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in map(json.loads, (ROOT / "benchmarks/results/loops.jsonl").read_text("utf-8").splitlines()):
        if line.get("what", "").startswith("exchanged rows: "):
            found[line["what"].removeprefix("exchanged rows: ")][tuple(line["case"])].append(line["us_a_step"])

    def against_present_rows(what, which):
        return [
            statistics.fmean(own[which] for own in found[what][case]) / statistics.fmean(own[which] for own in present)
            for case, present in found["as they are"].items()
        ]

    ordered = [against_present_rows("in the order of the loads", which) for which in ("forward", "backward")]
    forward, backward = map(summary, ordered)
    assert f"paused | forward {forward}) in {len(ordered[0])} shapes in bfloat16," in PAGE
    assert f"backward {backward}); not measured with pauses |" in PAGE
    again = summary(against_present_rows("as they are; missing words alone are loaded again", "forward"))
    assert f"| Only missing words are loaded again | forward {again[:4]} |" in PAGE

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
    assert f"In {len(bf16)} shapes in bfloat16 that this changed, forward loops took" in PAGE
    assert f"took {summary(bf16).replace(' (', ' of the time (')}) on an H200, and in {len(exact)} with" in PAGE
    assert f"exact products {summary(exact)[:4]}." in PAGE


def test_both_changes(ratios):
    bf16, tf32, exact = (ratios(dtype, "forward", "chosen") for dtype in BYTES)
    assert f"forward loops of {len(bf16)} shapes drawn at random took" in PAGE
    before = summary(bf16).replace(" (", " of the time before in bfloat16 (")
    assert f"took {before}), of {len(tf32)} in TF32 {summary(tf32)}) and of {len(exact)} with" in PAGE
    assert f"with exact products {summary(exact)})." in PAGE
    back = [summary(ratios(dtype, "backward", "chosen")) for dtype in BYTES]
    assert f"took {back[0]}), {back[1]}) and {back[2]};" in PAGE


def test_whole_calls():
    lines = map(json.loads, (ROOT / "benchmarks/results/pauses.jsonl").read_text("utf-8").splitlines())
    calls = [call["us"] / call["us_before"] for call in lines if call["set"] == "calls"]
    told = f"the {len(calls)} whose forward loops this changed most took {summary(calls)}), all products included."
    assert told.replace(" (", " of the time before (", 1) in PAGE


def test_a_variant_that_loads_missing_words_alone():
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in map(json.loads, (ROOT / "benchmarks/results/loops.jsonl").read_text("utf-8").splitlines()):
        if line.get("what", "").startswith("exchanged rows: "):
            found[line["what"].removeprefix("exchanged rows: ")][tuple(line["case"])].append(line["us_a_step"])
    again, present = found["as they are; missing words alone are loaded again"], found["as they are"]
    ratios = [
        statistics.fmean(own["forward"] for own in again[case]) / statistics.fmean(own["forward"] for own in times)
        for case, times in present.items()
    ]
    assert f"| Only missing words are loaded again | forward {summary(ratios)[:4]} |" in PAGE


@pytest.fixture(scope="module")
def interleaved():
    lines = (ROOT / "benchmarks/results/interleaved.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_loops_with_interleaved_rows(interleaved):
    times = collections.defaultdict(dict)
    for own in interleaved:
        if own["set"] == "rows of fresh shapes":
            times[own["dtype"], own["case"]][own["pause"]] = own["us_a_step"]

    def told(dtype, which):
        return [
            both["chosen"][which] / both["plain"][which] for (numbers, _), both in times.items() if numbers == dtype
        ]

    bf16, tf32, exact = (told(dtype, "forward") for dtype in BYTES)
    mean, rest = summary(bf16).split(" (")
    assert f"forward loops take {mean} of the time of plain rows in bfloat16 ({len(bf16)} shapes, {rest})," in PAGE
    for own, name in ((tf32, "in TF32"), (exact, "with exact products")):
        mean, rest = summary(own).split(" (")
        assert f"{mean} {name} ({len(own)}, {rest})" in PAGE
    assert f"backward loops in bfloat16 {summary(told('bf16', 'backward'))})." in PAGE


def test_whole_calls_with_interleaved_rows(interleaved):
    calls = [own for own in interleaved if own["set"] == "calls"]
    ratios = {
        kind: [own["us"]["now"] / own["us"]["before"] for own in calls if own["pass"] == kind]
        for kind in ("training", "inference")
    }
    every = [*ratios["training"], *ratios["inference"]]
    mean, rest = summary(every).split(" (")
    training, inference = (summary(ratios[kind])[:4] for kind in ("training", "inference"))
    assert f"All {len(calls)} measured calls that it changes were measured again" in PAGE
    assert f"they take {mean} of the time before ({rest}), training {training} and inference {inference}," in PAGE
    assert f"{sum(ratio > 1.05 for ratio in every)} take more than 1.05 of it" in PAGE


def test_leaving_out_rows_beyond_the_batch_takes_longer_in_forward_passes(interleaved):
    """Of shapes with eight and more such rows, which were timed with them and without them."""
    found = collections.defaultdict(lambda: collections.defaultdict(dict))
    for own in interleaved:
        if own["set"] == "calls":
            continue
        shape, kind = own["tilings"]["forward"], own["set"]
        groups = -(-int(own["case"].split("-")[1]) // shape["rows"])
        if groups * shape["rows"] - int(own["case"].split("-")[1]) >= 8 and own["pause"] != "plain":
            found[own["dtype"], own["case"]][kind] = own["us_a_step"]["forward"]
    both = [times for times in found.values() if "rows beyond the batch left out" in times and len(times) > 1]
    ratios = [
        times["rows beyond the batch left out"] / min(time for kind, time in times.items() if "left out" not in kind)
        for times in both
    ]
    assert len(ratios) >= 3
    assert min(ratios) > 1

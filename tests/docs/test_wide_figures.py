"""The page on the kernels states what the record of tilings of wide layers says."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from gatewise.contract.device import Device
from gatewise.contract.ranking import weights

ROOT = Path(__file__).parents[2]
LINES, CALLS = (
    [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text("utf-8").splitlines()]
    for name in ("wide_tilings.jsonl", "wide_calls.jsonl")
)
PAGE = " ".join((ROOT / "docs" / "kernel-internals.md").read_text("utf-8").split())
LEAST = int(weights(Device.named("h200"), "persistent wide layers")["least_units"])


@pytest.mark.parametrize(
    ("dtype", "name", "sentence"),
    [
        ("bf16", "forward", "{0} forward loops in bfloat16 take {1} of the time before ({2} to {3})"),
        ("tf32", "forward", "{0} in TF32 {1} ({2} to {3})"),
        ("tf32", "backward", "and {0} backward loops in TF32 {1} ({2} to {3})"),
    ],
)
def test_loops_of_shapes_drawn_at_random(dtype, name, sentence):
    cases = {}
    for line in LINES:
        asked = (dtype, name, "drawn: choices before and after")
        if (line["dtype"], line["pass"], line["set"]) == asked and line["tiling"]["hidden"] >= LEAST:
            cases.setdefault(line["case"], {})[line["rank"]] = line["us_a_step"]
    ratios = [of[1] / of[0] for of in cases.values() if len(of) == 2]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    assert sentence.format(len(ratios), *(f"{ratio:.2f}" for ratio in (mean, min(ratios), max(ratios)))) in PAGE


def test_whole_calls_before_and_after():
    ratios = [call["us"] / call["us_before"] for call in CALLS if call["kept"]]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    assert (
        f"changes {len(ratios)}, which take {mean:.2f} of the time before ({min(ratios):.2f} to {max(ratios):.2f})"
        in PAGE
    )
    narrower = [call["us"] / call["us_before"] for call in CALLS if call["sizes"][3] < LEAST]
    assert f"narrower layers, of which one call took {max(narrower):.2f} times as long" in PAGE


def test_the_page_says_from_which_size_on_layers_are_wide():
    assert f"From {LEAST} hidden units on" in PAGE

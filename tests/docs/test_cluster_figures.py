"""The page on the kernels states what the exchange of values in clusters takes, as its records have it."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from gatewise.contract.device import Device
from gatewise.contract.ranking import weights

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/kernel-internals.md").read_text("utf-8").split())
LARGE = "calls with clusters of 9 to 16 blocks in backward passes"


def lines(name):
    return [json.loads(line) for line in (ROOT / "benchmarks/results" / name).read_text("utf-8").splitlines()]


def ratios(wanted, accepts=lambda call: True):
    return [
        call["us"] / call["us_before"] for call in lines("clusters.jsonl") if call["set"] == wanted and accepts(call)
    ]


def geometric(values):
    return f"{math.exp(statistics.fmean(map(math.log, values))):.2f}"


def ends(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def test_whole_calls_before_and_after():
    every, long = ratios("calls"), ratios("calls", lambda call: call["sizes"][0] >= 100)
    bf16, fp16 = (ratios("calls", lambda call, of=name: call["precision"] == of) for name in ("bf16", "fp16"))
    assert (
        f"changes {len(every)}, which take {geometric(every)} of the time before ({ends(every)}; {geometric(long)} "
        f"from 100 steps on; bfloat16 {geometric(bf16)}, float16 {geometric(fp16)})"
    ) in PAGE


def test_resident_clusters():
    counted = {
        (line["blocks"], line["blocks_of_a_multiprocessor"]): line["clusters"]
        for line in lines("clusters.jsonl")
        if line["set"] == "resident clusters"
    }
    known = weights(Device.named("h200"), "persistent clusters")
    assert {blocks: int(known[str(blocks)]) for blocks in range(1, 9)} == {
        blocks: counted[blocks, 1] for blocks in range(1, 9)
    }
    assert all(counted[blocks, 2] >= 2 * counted[blocks, 1] for blocks in range(2, 9))
    assert f"An H200 runs {counted[8, 1]} clusters of eight blocks beside each other" in PAGE
    large = [counted[blocks, 1] for blocks in range(9, 17)]
    assert (min(large), max(large)) == (7, 9)
    assert "clusters of 9 to 16 blocks, of which an H200 runs seven to nine," in PAGE


def test_calls_with_large_clusters():
    found = ratios(LARGE, lambda call: -(-call["sizes"][1] // 8) * call["sizes"][5] <= 7)
    assert f"whole calls take {ends(found)} ({len(found)} calls, {geometric(found)} in the geometric mean)" in PAGE


def loops(name, least, most, *, paused=False):
    """Return the times of loops in clusters, divided by those of the others, for shapes with so many units.

    With `paused`, they are those of the record with pauses, otherwise of the record before.
    """
    cases = {}
    for line in lines("tilings.jsonl"):
        if (
            ("refit" in line) == paused
            and "distributed" in line["tiling"]
            and line["pass"] == name
            and least <= line["tiling"]["hidden"] <= most
        ):
            cases.setdefault(line["case"], ([], []))[line["tiling"]["distributed"]].append(line["us_a_step"])
    return [min(shared) / min(polled) for polled, shared in cases.values() if shared and polled]


def test_loops():
    forward, backward = loops("forward", 33, 256, paused=True), loops("backward", 33, 256, paused=True)
    assert (
        f"In {len(forward)} drawn shapes of 33 to 256 units, the loops of the forward pass take {geometric(forward)} "
        f"of the time of loops that exchange values through L2 with pauses ({ends(forward)}), and in {len(backward)} "
        f"those of the backward pass {geometric(backward)} ({ends(backward)};"
    ) in PAGE


def test_loops_of_single_blocks_and_of_large_clusters():
    forward, backward, large = loops("forward", 1, 32), loops("backward", 1, 32), loops("backward", 257, 512)
    assert (
        f"In {len(forward)} shapes with up to 32 units, for which a single block suffices, forward loops take "
        f"{geometric(forward)} of the time, and backward loops {geometric(backward)}."
    ) in PAGE
    assert f"{len(large)} backward loops of up to 512 units take {geometric(large)} of the time." in PAGE

"""The numbers on the page about training are those of the records of one, two and four GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
H100 = "NVIDIA H100 80GB HBM3"
WEIGHTS = 10_000 * 1500 * 2 + 10_000 + 4 * 6000 * 1500 + 4 * 6000


def lines(name):
    return [json.loads(line) for line in (ROOT / "benchmarks/results" / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def page():
    return " ".join((ROOT / "docs/training.md").read_text("utf-8").split())


@pytest.fixture(scope="module")
def steps():
    rows = [
        row
        for row in lines("scale.jsonl")
        if row["run"]["device"] == H100 and row["settings"].get("vocabulary") == 10_000
    ]
    return {(row["way"], row["settings"]["processes"], row["settings"]["batch"]): row["median"] for row in rows}


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (128, "is {:.1f} times as fast on two GPUs as on one, and {:.1f} times on four"),
        (20, "is not hidden: {:.1f} times on two GPUs, and {:.1f} times on four"),
    ],
)
def test_how_much_faster_several_gpus_are(page, steps, batch, told):
    one, two, four = (steps["gatewise train lm", count, batch] for count in (1, 2, 4))
    assert told.format(2 * one / two, 4 * one / four) in page
    assert f"{4 * WEIGHTS / 1e6:.0f} MB in float32" in page


def test_the_readme_says_how_much_faster_several_gpus_are(steps):
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    faster = {
        batch: [
            count * steps["gatewise train lm", 1, batch] / steps["gatewise train lm", count, batch] for count in (2, 4)
        ]
        for batch in (128, 20)
    }
    assert "trains {:.1f} times as fast on two H100s and {:.1f} times on four".format(*faster[128]) in readme
    assert "with 20 columns {:.1f} and {:.1f} times".format(*faster[20]) in readme


def test_what_dividing_weights_saves_and_costs(page):
    rows = {row["way"]: row for row in lines("scale.jsonl") if row["settings"].get("vocabulary") == 500_000}
    apart, whole = rows["gatewise.LSTM, fully_shard"], rows["gatewise.LSTM, DDP"]
    assert apart["settings"]["processes"] == whole["settings"]["processes"] == 4
    shown = [each["allocated_bytes"] / 2**30 for each in (apart, whole)]
    assert "takes {:.1f} GiB of memory at its peak instead of {:.1f} GiB".format(*shown) in page
    assert f"and {100 * (apart['median'] / whole['median'] - 1):.0f} % more time" in page


def test_where_separate_layers_help(steps):
    plain, apart = "gatewise.LSTM, DDP", "gatewise.LSTM, DDP, for_data_parallel"
    assert steps[apart, 2, 128] < steps[plain, 2, 128]
    assert steps[apart, 2, 20] > steps[plain, 2, 20]


def test_the_times_of_both_tilings(page):
    found = {
        each["device"]: each["launches"]["recurrent_backward"]
        for each in lines("scale_profile.jsonl")
        if each["batch"] == 128 and each["way"] in ("gatewise train lm", "gatewise train lm, rows")
    }
    least, most = min(found[H100]), max(found[H100])
    assert f"takes {least / 1000:.2f} to {most / 1000:.2f} ms for a layer" in page
    assert {f"{each / 1000:.2f}" for each in found["NVIDIA H200"]} == {"1.05"}
    assert "the one that was chosen on one GPU when that was measured 1.05 ms" in page

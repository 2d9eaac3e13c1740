"""The numbers on the page about training are those of the records of one and of two GPUs."""

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
    rows = [row for row in lines("scale.jsonl") if row["run"]["device"] == H100]
    return {(row["way"], row["settings"]["processes"], row["settings"]["batch"]): row["median"] for row in rows}


def test_what_two_gpus_take_longer(page, steps):
    longer = steps["gatewise train lm", 2, 128] - steps["gatewise train lm", 1, 128]
    assert f"takes {1e3 * longer:.2f} ms longer than on one" in page
    assert f"{4 * WEIGHTS / 1e6:.0f} MB in float32" in page


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
    assert "the one that is chosen on one GPU 1.05 ms" in page

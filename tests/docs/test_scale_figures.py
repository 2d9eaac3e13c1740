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
        (128, "was {:.1f} times as fast on two GPUs as on one, and {:.1f} times on four"),
        (20, "not hidden: {:.1f} times on two GPUs, and {:.1f} times on four"),
    ],
)
def test_how_much_faster_several_gpus_are(page, steps, batch, told):
    one, two, four = (steps["gatewise train lm", count, batch] for count in (1, 2, 4))
    assert told.format(2 * one / two, 4 * one / four) in page
    assert f"{4 * WEIGHTS / 1e6:.0f} MB in float32" in page


def test_the_readme_states_the_speed_of_several_gpus(steps):
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    words = [count * 128 * 35 / steps["gatewise train lm", count, 128] / 1e6 for count in (2, 4)]
    assert "on {:.2f} million words a second with two H100s, and on {:.2f} million with four".format(*words) in readme


def test_what_one_gpu_gains_from_the_tiling_of_several(page, steps):
    profile = [each for each in lines("scale_profile.jsonl") if each["batch"] == 128]
    layer = {each["device"]: min(each["launches"]["recurrent_backward"]) / 1e6 for each in profile}
    one, four = steps["gatewise train lm", 1, 128], steps["gatewise train lm", 4, 128]
    faster = one - 2 * (layer["NVIDIA H200"] - layer[H100])
    assert f"about {100 * (one / faster - 1):.0f} % faster" in page, one / faster
    assert f"four GPUs {4 * faster / four:.1f} times as fast as one" in page, 4 * faster / four


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
    assert "the one that one GPU then ran took 1.05 ms" in page


def test_the_times_of_an_all_reduce(page):
    found = {
        (each["operation"], each["protocol"]): each["us"]
        for each in lines("collectives.jsonl")
        if (each["values"], each["dtype"]) == (9_000_000, "float32") and each["largest_ctas"] in (24, None)
    }
    nccl = [found["all_reduce", protocol] for protocol in (None, "LL128", "Simple")]
    told = "takes {:.0f} us with the protocol that NCCL chooses, {:.0f} us with `LL128` and {:.0f} us with `Simple`"
    assert told.format(*nccl) in page
    assert f"takes {found['symm_mem.two_shot_all_reduce_', None]:.0f} us (`benchmarks/results/coll" in page

"""The numbers on the page about training are those of the records of one, two and four GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
WEIGHTS = 10_000 * 1500 * 2 + 10_000 + 4 * 6000 * 1500 + 4 * 6000


def lines(name):
    return [json.loads(line) for line in (ROOT / "benchmarks/results" / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def page():
    return " ".join((ROOT / "docs/training.md").read_text("utf-8").split())


def steps_of(device):
    rows = [row for row in lines("scale.jsonl") if row["run"]["device"] == device and row["status"] == "measured"]
    return {
        (row["case"], row["way"], row["settings"]["processes"], row["settings"]["batch"]): row["median"] for row in rows
    }


def speed_up(device, case, way, batch, processes):
    steps = steps_of(device)
    return processes * steps[case, way, 1, batch] / steps[case, way, processes, batch]


LM = "ptb_large", "gatewise train lm"


def test_how_much_faster_several_gpus_are(page):
    two, four = (speed_up(H200, *LM, 128, count) for count in (2, 4))
    assert f"is {two:.1f} times as fast on two H200s as on one, and {four:.1f} times on four" in page
    translation = speed_up(H200, "iwslt-50-50-128", "gatewise train nmt", 128, 4)
    assert f"translation is {translation:.1f} times as fast on four" in page
    few = [speed_up(H200, *LM, 20, count) for count in (2, 4)]
    assert "not hidden: {:.1f} times on two H200s, and {:.1f} times on four.".format(*few) in page
    # With one process no gradient is exchanged, and the way with rows is the same.
    rows = [speed_up(H200, LM[0], f"{LM[1]}, rows", 20, count) for count in (2, 4)]
    assert "in place of its matrix there: {:.1f} and {:.1f} times".format(*rows) in page
    steps = steps_of(H200)
    assert steps[LM[0], f"{LM[1]}, rows", 2, 20] < steps[LM[0], f"{LM[1]}, rows, bfloat16", 2, 20]
    assert f"{4 * WEIGHTS / 1e6:.0f} MB in float32" in page


def test_the_readme_states_the_speed_of_several_gpus():
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    words = [count * 128 * 35 / steps_of(H200)[*LM, count, 128] / 1e6 for count in (2, 4)]
    assert "on {:.2f} million words a second with two H200s, and on {:.2f} million with four".format(*words) in readme


def test_what_dividing_weights_saves_and_costs(page):
    rows = {row["way"]: row for row in lines("scale.jsonl") if row["settings"].get("vocabulary") == 500_000}
    apart, whole = rows["gatewise.LSTM, fully_shard"], rows["gatewise.LSTM, DDP"]
    assert apart["settings"]["processes"] == whole["settings"]["processes"] == 4
    shown = [each["allocated_bytes"] / 2**30 for each in (apart, whole)]
    assert "takes {:.1f} GiB of memory at its peak instead of {:.1f} GiB".format(*shown) in page
    assert f"and {100 * (apart['median'] / whole['median'] - 1):.0f} % more time" in page


def test_where_separate_layers_help():
    steps = steps_of(H100)
    plain, apart = "gatewise.LSTM, DDP", "gatewise.LSTM, DDP, for_data_parallel"
    assert steps["ptb_large", apart, 2, 128] < steps["ptb_large", plain, 2, 128]
    assert steps["ptb_large", apart, 2, 20] > steps["ptb_large", plain, 2, 20]


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

"""The numbers on the page about training are those of the records of one, two and four GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gatewise.models import table_gradient
from gatewise.training.factor_exchange import _MOST_OF_GRADIENTS

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
    assert f"is {two:.1f} times as fast on two H200s as on one, and {four:.1f} times on four." in page
    translation = speed_up(H200, "iwslt-50-50-128", "gatewise train nmt", 128, 4)
    assert f"translation is {translation:.1f} times as fast on four" in page
    whole = speed_up(H200, LM[0], f"{LM[1]}, whole gradients", 20, 2)
    assert f"On two GPUs training is then {whole:.1f} times as fast as on one." in page
    factors = speed_up(H200, *LM, 20, 2)
    assert f"which are the default, it is {factors:.1f} times as fast." in page
    changes = " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())
    assert f"is {factors:.2f} times as fast as on one ({whole:.2f} with whole gradients)" in changes
    steps = steps_of(H200)
    # With the factors, which are rows in the case of an embedding.
    assert steps[LM[0], f"{LM[1]}, rows", 2, 20] == pytest.approx(steps[*LM, 2, 20], rel=0.03)
    assert steps[LM[0], f"{LM[1]}, rows", 2, 20] < steps[LM[0], f"{LM[1]}, rows, bfloat16", 2, 20]
    assert f"{4 * WEIGHTS / 1e6:.0f} MB in float32" in page


def test_how_fast_the_gradient_of_an_embedding_is():
    chosen = "{_COMPARED} compared, {_ADDED} added, {_COLUMNS} columns, {_WARPS} warps".format(**vars(table_gradient))
    rows = lines("table_gradient.jsonl")
    ratios = [row["us"][chosen] / row["us"]["aten"] for row in rows]
    assert max(row["tokens"] for row in rows) == table_gradient.MOST_TOKENS
    told = f"in {min(ratios):.2f} to {max(ratios):.2f} of the time of PyTorch's operator for 700 to 4,096 tokens"
    assert told in " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())


def test_where_factors_of_gradients_take_less_time(page):
    steps = {each["batch"]: each for each in lines("factor_exchange.jsonl")}
    ratios = {batch: each["us_factors"] / each["us_whole"] for batch, each in steps.items()}
    told = f"take {ratios[20]:.2f} of the time of a step, those of 1,400 tokens {ratios[40]:.2f}"
    assert f"the factors of {20 * 35} tokens on each {told}" in page
    said = " ".join((ROOT / "gatewise/training/factor_exchange.py").read_text("utf-8").split())
    first, *others = [(f"{ratios[batch]:.2f}", f"{steps[batch]['share']:.2f}") for batch in (20, 32, 40, 64)]
    after = ["{} at {}".format(*each) for each in others]
    told = f"a step took {first[0]} of the time at a share of {first[1]}, {after[0]}, {after[1]}, and {after[2]}"
    assert told in said
    for each in steps.values():  # the choice that the measurement is for
        assert (each["us_factors"] < each["us_whole"]) == (each["share"] <= _MOST_OF_GRADIENTS)


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

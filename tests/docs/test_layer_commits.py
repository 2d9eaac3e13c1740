"""The page on benchmarks states the commits of the records in the layers' tables."""

from __future__ import annotations

import collections
import json
import statistics
from pathlib import Path

from gatewise.benchmarks import record
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, TRAIN, LayerRecord, newest

ROOT = Path(__file__).parents[2]
HALVES = {"c06559b", "d535a43b3c"}  # the commits of the records with float16 products after the loop
AGAIN = "2f9d75a7c8"  # of rows that were measured again after their tiling changed


def records(name):
    rows = newest(record.read_lines(record.path_of(ROOT / record.RESULTS, name), LayerRecord))
    return [row for row in rows if row.kernel == "auto"]


def page():
    return " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())


def of_halves(rows):
    return {(row.dtype, row.direction) for row in rows if row.run.commit[:10] in HALVES}


def test_the_page_names_the_commit_of_every_cell():
    every = records("lstm")
    assert {row.dtype for row in every} == {"bf16", "tf32", "fp16", "fp32"}
    rows = [row for row in every if row.run.commit[:10] != AGAIN]
    again = [row for row in every if row.run.commit[:10] == AGAIN]
    assert {row.direction for row in again} == {TRAIN}
    assert f"{len(again)} rows of commit {AGAIN}: " in page()
    ((commit, _),) = collections.Counter(
        row.run.commit[:10] for row in rows if row.run.commit[:10] not in HALVES
    ).items()
    assert of_halves(rows) == {("tf32", TRAIN)}
    assert all(row.run.commit[:10] in HALVES for row in rows if (row.dtype, row.direction) == ("tf32", TRAIN))
    first, second = sorted(HALVES)
    expected = f"all of them are of commit {commit}, except training in TF32, "
    assert expected in page()
    assert f"(commits {first} and {second})" in page()


def test_the_page_compares_rows_that_were_measured_again_with_those_before():
    path = record.path_of(ROOT / record.RESULTS, "lstm")
    every = [row for row in record.read_lines(path, LayerRecord) if row.kernel == "auto"]
    before = newest([row for row in every if row.run.commit[:10] != AGAIN], "NVIDIA H200")
    olds = {(row.case, row.dtype, row.direction): row.times for row in before}
    again = [row for row in every if row.run.commit[:10] == AGAIN]

    def ratio(mode, who):
        ratios = [
            row.times[mode][who].median / olds[row.case, row.dtype, row.direction][mode][who].median for row in again
        ]
        return f"{statistics.geometric_mean(ratios):.2f}"

    captured, called = ([ratio(mode, who) for who in ("gatewise", "nn.LSTM")] for mode in (GRAPH, EAGER))
    assert (
        f"In a CUDA graph, gatewise takes {captured[0]} of the time of the records that these {len(again)} replace, "
        f"and `torch.nn.LSTM` {captured[1]}."
    ) in page()
    assert f"Called from Python, gatewise takes {called[0]} and `torch.nn.LSTM` {called[1]} of the time:" in page()


def test_the_page_compares_normalized_layers_with_cudnn():
    found = {}
    for row in map(json.loads, record.path_of(ROOT / record.RESULTS, "cells").read_text("utf-8").splitlines()):
        if (row["cell"], row["direction"], row["run"]["device"]) == ("layer_norm_lstm", TRAIN, "NVIDIA H200"):
            for way in ("gatewise", "nn.LSTM"):
                if row["ways"].get(way, {}).get("times"):
                    found[row["case"], row["dtype"], way] = row["ways"][way]["times"]
    keys = {key[:2] for key in found if key[2] == "nn.LSTM"}
    ratios = {
        (*key, mode): found[*key, "nn.LSTM"][mode]["median"] / found[*key, "gatewise"][mode]["median"]
        for key in keys
        for mode in (EAGER, GRAPH)
    }
    least = ratios.pop(("100-64-1024", "bf16", GRAPH))
    assert 1 < least < min(ratios.values())
    assert min(ratios.values()) >= 1.2
    assert f"in the case 100-64-1024 it is {least:.2f} times as fast there, in all others at least 1.2 times." in page()


def test_the_page_states_which_records_of_grus_are_newer():
    rows = records("gru")
    assert of_halves(rows) == {("tf32", TRAIN)}
    assert all(row.run.commit[:10] in HALVES for row in rows if (row.dtype, row.direction) == ("tf32", TRAIN))
    first, second = sorted(HALVES)
    assert f"Training in TF32 is of commits {first} and {second}, with float16 products" in page()

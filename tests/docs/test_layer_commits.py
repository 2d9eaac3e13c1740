"""The page on benchmarks states the commits of the records in the layers' tables."""

from __future__ import annotations

import collections
import json
from pathlib import Path

from gatewise.benchmarks import record
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, TRAIN, LayerRecord, newest

ROOT = Path(__file__).parents[2]
HALVES = {"c06559b", "d535a43b3c"}  # the commits of the records with float16 products after the loop


def records(name):
    rows = newest(record.read_lines(record.path_of(ROOT / record.RESULTS, name), LayerRecord))
    return [row for row in rows if row.kernel == "auto"]


def page():
    return " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())


def of_halves(rows):
    return {(row.dtype, row.direction) for row in rows if row.run.commit[:10] in HALVES}


def test_the_page_names_the_commit_of_every_cell():
    rows = records("lstm")
    assert {row.dtype for row in rows} == {"bf16", "tf32", "fp16", "fp32"}
    (commit, _), (later, _), (directions, _), (last, _) = collections.Counter(
        row.run.commit[:10] for row in rows
    ).most_common()
    assert len({row.run.date[:10] for row in rows if row.run.commit[:10] == commit}) == 1
    again = [row for row in rows if row.run.commit[:10] == later]
    assert len({row.case for row in again}) == 6
    assert {row.dtype for row in again} == {"bf16", "tf32", "fp16"}
    twice = [row for row in rows if row.run.commit[:10] == directions]
    assert {row.case for row in twice} == {"tagger", "tagger_ragged", "nmt_encoder", "asr"}
    assert {row.dtype for row in twice} == {"bf16", "tf32", "fp16"}
    assert {(row.case, row.dtype) for row in rows if row.run.commit[:10] == last} == {("tagger_ragged", "fp32")}
    text = page()
    assert (
        f"All rows were measured in one run on one machine, at commit {commit}, but those of six wide shapes "
        f"in bf16, fp16 and tf32, which were measured again at commit {later}"
    ) in text
    assert f"those of the four bidirectional shapes in the same precisions, at commit {directions}," in text
    assert f"(tagger_ragged also in fp32, at commit {last})" in text


def test_the_page_on_kernels_states_whole_calls_by_warpgroups():
    rows = [row for row in records("lstm") if (row.case, row.dtype) == ("50-256-512", "bf16")]
    times = {row.direction: f"{row.times[GRAPH]['gatewise'].median / 50 * 1e6:.1f}" for row in rows}
    assert all("by warpgroups" in row.algorithm for row in rows)
    told = f"takes {times[TRAIN]} us in training and {times['inference']} us in inference, all products included"
    assert told in " ".join((ROOT / "docs/kernel-internals.md").read_text("utf-8").split())


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
    (again,) = {row.run.commit[:10] for row in rows if row.dtype == "bf16"}
    assert f"and bf16 was measured again at commit {again};" in page()

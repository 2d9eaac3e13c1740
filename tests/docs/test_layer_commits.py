"""The page on benchmarks states the commits of the records in the layers' tables."""

from __future__ import annotations

import collections
import json
import math
import statistics
from pathlib import Path

from gatewise.benchmarks import record
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, TRAIN, LayerRecord, newest

ROOT = Path(__file__).parents[2]
SINCE_PAUSES = "d00dddaa6a", "d4805eacac"  # of layers whose blocks pause


def records(name):
    rows = newest(record.read_lines(record.path_of(ROOT / record.RESULTS, name), LayerRecord))
    return [row for row in rows if row.kernel == "auto"]


def page():
    return " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())


def test_the_page_names_the_commits_of_all_rows_of_lstms_and_grus():
    found, since = {}, []
    for name in ("lstm", "gru"):
        for row in records(name):
            kind = row.direction == TRAIN and row.dtype != "fp32"
            if name == "lstm" and row.run.commit[:10] in SINCE_PAUSES:
                since.append(row)
                continue
            if name == "lstm" and kind and row.case.startswith("decode_"):
                kind = "one step in 16 bits"
            elif name == "lstm" and row.dtype in ("bf16", "fp16") and row.settings["hidden_size"] <= 256:
                kind = "narrow"
            if row.case.startswith("decode_") and row.direction == TRAIN and not kind:
                # Those of a GRU with 64 sequences became faster once more.
                kind = "many" if name == "gru" and row.case.startswith("decode_64") else "one step"
            found.setdefault((name, kind), set()).add((row.run.commit[:10], row.run.date))
    assert all(len(found[name, kind]) == 1 for name in ("lstm", "gru") for kind in (False, True))  # a run has one date
    of = {key: {commit for commit, _ in rows}.pop() for key, rows in found.items()}
    assert all(len({commit for commit, _ in rows}) == 1 for rows in found.values())
    steps = {"lstm": "at commit {}.", "gru": "at commit {} with one sequence and {} with 64."}
    assert f"up to 256 units were measured again in 16 bits at commit {of['lstm', 'narrow']}, since" in page()
    assert all(row.dtype != "fp32" and not row.case.startswith("decode_") for row in since)
    counts = collections.Counter(row.run.commit[:10] for row in since)
    most, some = SINCE_PAUSES
    assert counts[most] > counts[some] > 0
    assert f"with TF32, most of them at commit {most} and some at commit {some}." in page()
    single = f", and of a single time step (`decode_*`) at commit {of['lstm', 'one step in 16 bits']}"
    for name, step in steps.items():
        told = f"training in 16 bits and with TF32 at commit {of[name, True]}{single if name == 'lstm' else ''}"
        told = f"{told}; inference and training without TF32 at"
        told = f"{told} commit {of[name, False]}, and of the latter a single time step"
        assert f"{told} {step.format(of[name, 'one step'], of.get((name, 'many')))}" in page()


def test_the_page_states_how_calls_from_python_depend_on_the_cpu():
    times, before = {}, {}
    for row in record.read_lines(record.path_of(ROOT / record.RESULTS, "lstm"), LayerRecord):
        if row.kernel == "auto" and "nn.LSTM" in row.times.get(EAGER, {}) and "H200" in row.run.device:
            found = times if row.run.commit[:10] in SINCE_PAUSES else before
            found[row.case, row.dtype, row.direction] = row.times[EAGER]["nn.LSTM"].median
    ratios = [times[key] / before[key] for key in times]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    told = f"took {mean:.2f} of its time in the runs before ({min(ratios):.2f} to {max(ratios):.2f}) when it was called"
    assert told in page()


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

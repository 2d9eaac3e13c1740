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
SINCE_PAUSES = "d00dddaa6a", "d4805eacac", "abad7d9396"  # of layers whose blocks pause
INTERLEAVED = "6777670009"  # of layers whose blocks exchange interleaved rows


def records(name):
    rows = newest(record.read_lines(record.path_of(ROOT / record.RESULTS, name), LayerRecord))
    return [row for row in rows if row.kernel == "auto"]


def page():
    return " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())


def kind_of(row):
    """Return the first words of the line of the table of commits that has a row."""
    precise, single = row.dtype == "fp32", row.case.startswith("decode_") and row.direction == TRAIN
    if single:
        return f"training of a single step {'with `fp32`' if precise else '(`decode_*`) with'}"
    if row.run.commit[:10] == INTERLEAVED:
        return "`bf16`, `fp16` and `tf32` of wide layers"
    if row.run.commit[:10] in SINCE_PAUSES:
        return "`bf16`, `fp16` and `tf32`, whose blocks"
    if row.cell == "lstm" and row.dtype in ("bf16", "fp16") and row.settings["hidden_size"] <= 256:
        return "`bf16` and `fp16` with up to 256 units"
    return "inference, and training" if precise or row.direction != TRAIN else "training with"


def test_the_page_names_the_commits_of_all_rows_of_lstms_and_grus():
    found = collections.defaultdict(lambda: {"lstm": collections.Counter(), "gru": collections.Counter()})
    for name in ("lstm", "gru"):
        for row in records(name):
            found[kind_of(row)][name][row.run.commit[:10]] += 1
    lines = [line for line in (ROOT / "docs/benchmarks.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    assert len(found) == 7
    for kind, commits in found.items():
        (line,) = [line for line in lines if line.startswith(f"| {kind}")]
        told = [", ".join(commit for commit, _ in commits[name].most_common()) for name in ("lstm", "gru")]
        assert line.endswith(f"| {told[0]} | {told[1]} |" if told[1] else f"| {told[0]} | |")


def test_the_page_states_how_calls_from_python_depend_on_the_cpu():
    times, before = {}, {}
    for row in record.read_lines(record.path_of(ROOT / record.RESULTS, "lstm"), LayerRecord):
        if row.kernel == "auto" and "nn.LSTM" in row.times.get(EAGER, {}) and "H200" in row.run.device:
            found = times if row.run.commit[:10] in (*SINCE_PAUSES, INTERLEAVED) else before
            found[row.case, row.dtype, row.direction] = row.times[EAGER]["nn.LSTM"].median
    ratios = [times[key] / before[key] for key in times]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    told = f"took {mean:.2f} of their time in the runs before ({min(ratios):.2f} to {max(ratios):.2f})"
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

"""The page on the kernels states what the record of large calls says."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent import dry_run
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import layer_pairs

ROOT = Path(__file__).parents[2]
CALLS = [
    json.loads(line) for line in (ROOT / "benchmarks" / "results" / "large_calls.jsonl").read_text("utf-8").splitlines()
]
PAGE = " ".join((ROOT / "docs" / "kernel-internals.md").read_text("utf-8").split())


def mean(ratios):
    return math.exp(statistics.fmean(map(math.log, ratios)))


def test_large_calls_from_python():
    known = [call for call in CALLS if call["called_us_before"] and not call["pairs"]]
    before = mean([call["called_us_before"] / call["us_before"] for call in known])
    now = mean([call["called_us"] / call["us"] for call in known])
    assert f"{len(known)} of them took {before:.2f} times as long from Python as in a CUDA graph" in PAGE
    assert f"and they take {now:.2f} times as long now" in PAGE


def test_large_calls_in_pairs():
    ratios = [call["us"] / call["us_before"] for call in CALLS if call["pairs"]]
    told = f"{len(ratios)} of them take {mean(ratios):.2f} of the time before ({min(ratios):.2f} to {max(ratios):.2f})"
    assert told in PAGE


def test_the_memory_of_pairs(monkeypatch):
    problem = Problem(20_000, 64, 200, 200, num_layers=2, dtype=torch.bfloat16, needs_grad=True)
    device = Device.named("h200")
    assert "layers in pairs" in persistent.algorithm(problem, device)

    def needed():
        found = dry_run._memory_of.__wrapped__(problem, device)
        kept = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in found.kept)
        return kept + found.workspace_bytes

    pairs = needed()
    monkeypatch.setattr(layer_pairs, "stacked_cut", lambda *given, **options: None)
    more = f"{pairs / needed() - 1:.0%}".replace("%", " %")
    assert f"{more} more, by prediction, in a training call of 20,000 steps, 64 sequences and two layers of 200" in PAGE

"""The pages state what copying weights together and float32 gradients save under autocast."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_what_float32_gradients_save_in_a_graph():
    lines = (ROOT / "benchmarks/results/autocast_weights.jsonl").read_text("utf-8").splitlines()
    graphs = [json.loads(line)["graph"] for line in lines]
    shares = [graph["after"] / graph["before"] for graph in graphs]
    page = " ".join((ROOT / "docs/kernel-internals.md").read_text("utf-8").split())
    assert len(shares) == 7
    assert f"this takes {min(shares):.2f} to {max(shares):.2f} of the former time in a CUDA graph" in page


def test_what_weights_in_cudnns_order_save():
    lines = (ROOT / "benchmarks/results/autocast_cudnn.jsonl").read_text("utf-8").splitlines()
    graphs = [json.loads(line)["graph"] for line in lines]
    before, after = ([graph[way] / graph["nn.LSTM"] for graph in graphs] for way in ("before", "after"))
    page = " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())
    assert len(graphs) == 10
    assert f"takes {min(after):.2f} to {max(after):.2f} of the time of `torch.nn.LSTM`" in page
    assert f"it took {min(before):.2f} to {max(before):.2f} times as long" in page

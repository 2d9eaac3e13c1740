"""The page on kernels states what copying weights together and float32 gradients save under autocast."""

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

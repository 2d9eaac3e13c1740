"""The numbers on the page about memory are those of the records of lean and normal training steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def newest():
    found = {}
    for line in (ROOT / "benchmarks/results/lstm.jsonl").read_text("utf-8").splitlines():
        record = json.loads(line)
        if (record["dtype"], record["direction"], record["status"]) == ("bf16", "train", "measured"):
            found[record["case"], record["kernel"]] = record
            found[record["case"], record["kernel"], record["run"]["commit"]] = record
    return found


def share(record):
    own = {side: record["peak_bytes"][side] - record["owned_bytes"][side] for side in ("gatewise", "nn.LSTM")}
    return own["gatewise"] / own["nn.LSTM"]


def test_every_lean_record_is_a_row(newest):
    page = (ROOT / "docs/memory.md").read_text("utf-8")
    cases = [case for case, *kernel in newest if kernel == ["lean"]]
    assert len(cases) >= 7
    for case in cases:
        lean = newest[case, "lean"]
        ordinary = newest[case, "auto", lean["run"]["commit"]]
        assert lean["run"]["commit"][:10] in page
        times = [each["times"]["graph"]["gatewise"]["median"] for each in (lean, ordinary)]
        row = next(line for line in page.splitlines() if line.startswith(f"| {case} ("))
        assert row.endswith(f"| {times[0] / times[1]:.2f}x | {share(lean):.2f}x | {share(ordinary):.2f}x |")

"""The page on the kernels states what replays save in loops that carry states."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = " ".join((ROOT / "docs/kernel-internals.md").read_text("utf-8").split())


def rows():
    lines = (ROOT / "benchmarks/results/carried_states.jsonl").read_text("utf-8").splitlines()
    return {row["case"]: row for row in map(json.loads, lines)}


def test_times_of_the_language_models():
    small, medium, large = (rows()[f"ptb_{size}"]["seconds"] for size in ("small", "medium", "large"))
    replayed, launched = ([1e3 * each[way] for each in (small, medium, large)] for way in ("replayed", "launched"))
    assert "takes {:.2f} ms with 200 units, {:.2f} ms with 650 and {:.2f} ms with 1500".format(*replayed) in TEXT
    assert "and {:.2f}, {:.2f} and {:.2f} ms without replays".format(*launched) in TEXT


def test_all_calls_are_replayed_with_memory_of_the_graphs():
    assert all(row["replayed"] == row["replayed_with_own_memory"] == 1 for row in rows().values())

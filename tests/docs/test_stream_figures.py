"""The times on the page about streams are those of the newest record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAYS = ("nn", "cell", "stream", "nn, graph of 16", "stream, graph of 16")


@pytest.mark.parametrize(("batch", "size"), [(1, 128), (1, 512), (1, 1024), (8, 512)])
def test_the_table_of_streams(batch, size):
    *_, newest = (ROOT / "benchmarks/results/streaming.jsonl").read_text("utf-8").splitlines()
    rows = {(row["B"], row["H"], row["way"]): row for row in json.loads(newest)["rows"]}

    def shown(way):
        digits = int("graph" in way)
        median, slow = (1e6 * rows[batch, size, way][name] for name in ("median", "q99"))
        return f"{median:.{digits}f} ({slow:.{digits}f})"

    line = f"| {batch}, {size} | {' | '.join(map(shown, WAYS))} |"
    assert line in (ROOT / "docs/how-to/stream.md").read_text("utf-8")


def test_the_readme_states_the_speed_of_streams():
    *_, newest = (ROOT / "benchmarks/results/streaming.jsonl").read_text("utf-8").splitlines()
    medians = {(row["B"], row["H"], row["way"]): row["median"] for row in json.loads(newest)["rows"]}
    calls, graphs = (medians[1, 512, f"nn{way}"] / medians[1, 512, f"stream{way}"] for way in ("", ", graph of 16"))
    sentence = (
        f"{calls:.1f} times as fast as `torch.nn.LSTM` with 512 units on an H200, and {graphs:.1f} times in CUDA "
        "graphs of 16 steps (one sequence, float32)."
    )
    assert sentence in " ".join((ROOT / "README.md").read_text("utf-8").split())

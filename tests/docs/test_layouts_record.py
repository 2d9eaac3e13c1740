"""The page's statements about the stepwise kernel agree with its newest record."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]


def mean_ratio(rows: list[dict], slower: str, faster: str) -> float:
    times = [row["microseconds_a_step"] for row in rows]
    return math.exp(statistics.fmean(math.log(time[slower] / time[faster]) for time in times))


def test_the_stepwise_kernel_is_as_fast_as_its_page_says() -> None:
    lines = (ROOT / "benchmarks" / "results" / "layouts.jsonl").read_text().splitlines()
    rows = json.loads(lines[-1])["rows"]
    page = (ROOT / "docs" / "kernel-internals.md").read_text("utf-8")
    for precision in ("bf16", "tf32", "fp32"):
        own = [row for row in rows if row["precision"] == precision]
        train = [row for row in own if row["mode"] == "training"]
        inference = [row for row in own if row["mode"] == "inference"]
        figures = [
            mean_ratio(train, "nn.LSTM", "chosen"),
            mean_ratio(inference, "nn.LSTM", "chosen"),
            mean_ratio(train, "nn.LSTM, eager", "chosen, eager"),
            mean_ratio(inference, "nn.LSTM, eager", "chosen, eager"),
            mean_ratio(train, "column", "row"),
            mean_ratio(inference, "column", "row"),
        ]
        assert f"| {precision} | {len(train)} | {' | '.join(f'{figure:.2f}' for figure in figures)} |" in page

"""The page on the kernels has the figures of the record of calls from Python."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAYS = {"nothing": "nothing computed", "gatewise": "gatewise.LSTM", "nn.LSTM": "nn.LSTM"}


def table():
    *_, newest = (ROOT / "benchmarks/results/python_calls.jsonl").read_text("utf-8").splitlines()
    lines = [f"| shape | {' | '.join(WAYS.values())} |", "|---|---:|---:|---:|"]
    for row in json.loads(newest)["rows"]:
        cells = [f"{row['us'][way]['two threads']:,.0f} ({row['us'][way]['one thread']:,.0f})" for way in WAYS]
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    return lines


def test_the_page_has_the_figures_of_the_newest_record():
    text = (ROOT / "docs/kernel-internals.md").read_text("utf-8")
    block = text.split("<!-- figures: python_calls -->\n")[1].split("<!-- /figures: python_calls -->")[0]
    assert block.splitlines() == table()

"""The figures of streams on a CPU in the documentation are those of the newest record."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/streams_on_cpu.jsonl").read_text("utf-8").splitlines()[-1])["rows"]


def span(cell, layers):
    ratios = [row["ratio"] for row in ROWS if (row["cell"], row["L"]) == (cell, layers)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_the_documentation_has_the_figures_of_the_record():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())
    lstm = f"an LSTM with one layer takes {span('LSTM', 1)} of the loop's time, with two layers {span('LSTM', 2)};"
    assert f"a step of {lstm} a step of a GRU takes {span('GRU', 1)} and {span('GRU', 2)}." in text
    assert {row["B"] for row in ROWS} == {1, 8}
    assert {row["H"] for row in ROWS} == {64, 256, 512}

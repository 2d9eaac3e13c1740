"""The figures of compiled calls in the documentation are those of the newest record."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/compiled_calls.jsonl").read_text("utf-8").splitlines()[-1])["rows"]


def between(kind, mode="", steps=None):
    ratios = [
        row["ratio"] for row in ROWS if row["kind"] == kind and mode in ("", row["mode"]) and steps in (None, row["T"])
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_the_documentation_has_the_figures_of_the_record():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())
    lstm, gru = ([between(kind, mode) for mode in ("inference", "training")] for kind in ("LSTM", "GRU"))
    assert f"an LSTM takes {lstm[0]} of the time in inference and {lstm[1]} in training" in text
    assert f"a GRU {gru[0]} and {gru[1]}." in text
    assert f"LSTMs of one step take {between('LSTM', steps=1)}." in text

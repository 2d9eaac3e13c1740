"""The numbers on the Keras page are those of the newest record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "keras_layer.jsonl"
KINDS = {"none": "none", "right": "padded on the right", "holes": "any steps"}


@pytest.mark.parametrize("row", json.loads(RECORD.read_text("utf-8").splitlines()[-1])["rows"], ids=str)
def test_a_row_stands_on_the_page(row):
    assert row["status"] == "measured"
    keras, ours = (row["seconds"][name]["median"] for name in ("keras", "gatewise"))
    sizes = " | ".join(str(row[letter]) for letter in "TBIH")
    expected = f"| {sizes} | {KINDS[row['mask']]} | {1e3 * keras:.2f} | {1e3 * ours:.2f} | {keras / ours:.1f}x |"
    assert expected in (ROOT / "docs" / "keras.md").read_text("utf-8")

"""The page on kernels states what the record of products of a few rows says."""

from __future__ import annotations

import json
import math
from pathlib import Path

from gatewise.kernels.cuda import few_rows

ROOT = Path(__file__).parents[2]
LINES = [json.loads(line) for line in (ROOT / "benchmarks/results/few_rows.jsonl").read_text("utf-8").splitlines()]
PRODUCTS = [line for line in LINES if "rows" in line]
CHOSEN = [line for line in PRODUCTS if line["chosen"]]
PAGE = " ".join((ROOT / "docs" / "kernel-internals.md").read_text("utf-8").split())


def test_slow_products_are_those_of_the_page():
    slow = [line["mm_us"] for line in PRODUCTS if 7 <= line["rows"] <= 16 and line["mm_us"] > 20]
    assert len(slow) > 20
    assert f"chooses kernels that take {min(slow):.0f} to {max(slow):.0f} us" in PAGE


def test_the_time_that_zeros_save():
    ratio = math.exp(sum(math.log(line["zeros_us"] / line["mm_us"]) for line in CHOSEN) / len(CHOSEN))
    assert f"{len(CHOSEN)} such products take {ratio:.2f} of the time of `torch.mm`" in PAGE
    assert f"products of 2 to {few_rows.MOST_ROWS} rows" in PAGE
    assert f"with {few_rows.LEAST_TERMS} to {few_rows.MOST_TERMS} terms" in PAGE


def test_products_with_zeros_are_as_exact():
    assert max(line["zeros_error"] for line in CHOSEN) <= max(line["mm_error"] for line in CHOSEN)

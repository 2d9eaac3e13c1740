"""The page on the kernels states where training steps take more than twice the floor, and in what parts."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.loops.above_floor import PARTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kernel-internals.md").read_text("utf-8")
STEPWISE = ("50-256-1024", "50-512-1024", "100-64-2048")  # in a CUDA graph these run on the kernel `stepwise`
EXCHANGE, PRODUCTS = ("arrival", "stores and next loads"), ("products",)


def rows():
    lines = (ROOT / "benchmarks/results/above_floor.jsonl").read_text("utf-8").splitlines()
    newest = {row["case"]: row for row in map(json.loads, lines) if row["dtype"] == "bf16"}
    return [row for case, row in newest.items() if case not in STEPWISE and ratio(row) > 2]


def floor(row):
    return sum(row["floor"].values())


def ratio(row):
    return row["us_a_step"]["all"] / floor(row)


def shares(cycles):
    """Return the percentages of the exchange, the products and everything else in the cycles of a step."""
    each = {part: cycles.get(part, 0) for part in PARTS}
    total = sum(each.values())
    exchange, products = (round(100 * sum(each[part] for part in parts) / total) for parts in (EXCHANGE, PRODUCTS))
    return f"{exchange} / {products} / {100 - exchange - products}"


def line_of(row):
    times = row["us_a_step"]
    others = times["all"] - times["forward"] - times["backward"]
    numbers = [times["all"], floor(row), ratio(row), times["forward"], times["backward"], others]
    of_loops = [shares(row["loops"][name]) for name in ("forward", "backward")]
    return f"| {row['case']} | {' | '.join([*(f'{number:.1f}' for number in numbers), *of_loops])} |"


def test_the_table_is_that_of_the_newest_records():
    block = PAGE.split("<!-- figures: above_floor -->\n")[1].split("<!-- /figures: above_floor -->")[0]
    assert block.splitlines()[2:] == [line_of(row) for row in rows()]


def test_padding_of_the_large_language_model():
    (large,) = (row for row in rows() if row["case"] == "ptb_large")
    copies = large["us_a_step"]["fit"] + large["us_a_step"]["operands"]
    assert f"these copies take {copies:.1f} of {large['us_a_step']['all']:.1f} us" in " ".join(PAGE.split())

"""The page on the kernels states where training steps take more than twice the floor, and in what parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loops.above_floor import CASES, PARTS
from gatewise.kernels.persistent.launches.auxiliary import AT_ONCE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kernel-internals.md").read_text("utf-8")
TEXT = " ".join(PAGE.split())
MODES = "bf16", "fp16"
STEPWISE = ("50-256-1024", "50-512-1024", "100-64-2048")  # in a CUDA graph these run on the kernel `stepwise`
WARPGROUPS = "nmt_encoder", "50-256-512"  # whose forward passes multiply by warpgroups
EXCHANGE, PRODUCTS = ("arrival", "stores and next loads"), ("products",)


def measured(dtype, until="9999"):
    lines = (ROOT / "benchmarks/results/above_floor.jsonl").read_text("utf-8").splitlines()
    known = [row for row in map(json.loads, lines) if row["date"] <= until]
    newest = {row["case"]: row for row in known if row["dtype"] == dtype}
    return {case: row for case, row in newest.items() if case not in STEPWISE}


def rows(dtype="bf16"):
    return [row for row in measured(dtype).values() if ratio(row) > 2]


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


@pytest.mark.parametrize("dtype", ["bf16", "tf32"])
def test_the_table_is_that_of_the_newest_records(dtype):
    block = PAGE.split(f"<!-- figures: above_floor {dtype} -->\n")[1].split("<!-- /figures: above_floor -->")[0]
    assert block.splitlines()[2:] == [line_of(row) for row in rows(dtype)]


def test_float16_beside_bfloat16():
    then = max(row["date"] for row in measured("fp16").values())  # some rows in bfloat16 are newer
    times = {dtype: {case: row["us_a_step"]["all"] for case, row in measured(dtype, then).items()} for dtype in MODES}
    ratios = [times["fp16"][case] / time for case, time in times["bf16"].items()]
    told = f"in float16 a step took {min(ratios):.2f} to {max(ratios):.2f} of the time in bfloat16 before"
    assert f"Before rows were interleaved, {told}" in TEXT


def test_parts_of_the_loops_by_size():
    found = {row["case"]: row["loops"] for row in rows()}
    sizes = {case: CASES[case].hidden_size for case in found}
    narrow = [loops for case, loops in found.items() if sizes[case] <= 650 and case not in WARPGROUPS]
    exchange = [sum(loops["forward"].get(part, 0) for part in EXCHANGE) for loops in narrow]
    of_all = [int(shares(loops["forward"]).split(" / ")[0]) for loops in narrow]
    assert f"{min(of_all)} to {max(of_all)} % of the forward loop is the exchange" in TEXT
    assert f"{round(min(exchange), -2):,} to {round(max(exchange), -2):,} clock cycles a step" in TEXT
    wide = [shares(loops[name]) for case, loops in found.items() if sizes[case] >= 1024 for name in loops]
    exchange, products = zip(*[map(int, each.split(" / ")[:2]) for each in wide], strict=True)
    assert f"products take {min(products)} to {max(products)} % of a loop" in TEXT
    assert f"and the exchange {min(exchange)} to {max(exchange)} %" in TEXT


def test_halved_factors_of_the_large_language_model():
    (large,) = (row for row in rows("tf32") if row["case"] == "ptb_large")
    halved = sum(time for name, time in large["us_a_step"].items() if name.startswith("half_"))
    assert f"with 1500 units {halved:.1f} of {large['us_a_step']['all']:.1f} us" in TEXT


def test_padding_of_the_large_language_model():
    (large,) = (row for row in rows() if row["case"] == "ptb_large")
    copies = large["us_a_step"]["fit"] + large["us_a_step"]["operands"]
    assert f"these copies take {copies:.1f} of {large['us_a_step']['all']:.1f} us" in TEXT


def test_products_without_padding_take_longer():
    lines = (ROOT / "benchmarks/results/unpadded_products.jsonl").read_text("utf-8").splitlines()
    ratios = []
    for times in (row["us"] for row in map(json.loads, lines)):
        copied = times["product with the padding, and a copy without it"]
        ratios += [us / copied for name, us in times.items() if "without padding" in name]
    assert f"take {min(ratios):.1f} to {max(ratios):.1f} times as long as one with padding and its copy" in TEXT


def test_how_much_faster_copies_are():
    lines = (ROOT / "benchmarks/results/copies.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]

    def us(what, **wanted):
        (found,) = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
        return found["us"][what]

    factors = {"source": "operands", "dtype": "bfloat16", "hidden_size": 1500}
    old = us("x and h", kernels="before", **factors)
    new = us("x and h", **{"kernels": "after", "rows under way": AT_ONCE["operands"]}, **factors)
    columns = {"hidden_size": 1150, "tokens": 5600}
    of_columns = us("columns of x, h and W", kernels="before", source="half", **columns)
    now = us("columns of x, h and W", threads=256, blocks=2112, **{"rows under way": 8}, **columns)
    assert f"in bfloat16 take {new:.1f} instead of {old:.1f} us, and the largest values" in TEXT
    assert f"of 1150 values {now:.1f} instead of {of_columns:.1f} us" in TEXT

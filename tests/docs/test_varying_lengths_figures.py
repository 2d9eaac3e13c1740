"""The page on benchmarks has the times of a tagger whose batches have varying lengths."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/benchmarks.md").read_text("utf-8")
ROWS = {
    "1 number of steps": (1, False),
    "10 numbers of steps": (10, False),
    "40 numbers of steps": (40, False),
    "40 numbers of steps, packed": (40, True),
}


def cells(row):
    theirs, ours = (timing["median"] for timing in row["seconds"].values())
    return f"{1e3 * theirs:.1f} | {1e3 * ours:.1f} | {theirs / ours:.1f}x"


def newest():
    lines = (ROOT / "benchmarks/results/varying_lengths.jsonl").read_text("utf-8").splitlines()
    return {(row["dtype"], row["lengths"], row["packed"]): row for row in map(json.loads, lines)}


def test_the_readme_has_the_range_of_batches_that_vary_and_are_not_packed():
    times = [cells(row).split()[-1] for (_, lengths, packed), row in newest().items() if lengths > 1 and not packed]
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    least, most = (time.removesuffix("x") for time in (min(times), max(times)))
    assert f"(docs/benchmarks.md#batches-of-varying-lengths) {least} to {most} times" in text
    packed = sorted(cells(row).split()[-1].removesuffix("x") for (*_, packed), row in newest().items() if packed)
    assert "or {} and {} times if they are packed".format(*packed) in text


def test_the_table_is_that_of_the_newest_records():
    found = newest()
    block = PAGE.split("<!-- figures: varying_lengths -->\n")[1].split("<!-- /figures: varying_lengths -->")[0]
    assert block.splitlines()[2:] == [
        f"| {name} | {cells(found['bf16-autocast', *key])} | {cells(found['fp32', *key])} |"
        for name, key in ROWS.items()
    ]

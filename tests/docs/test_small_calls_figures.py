"""The figures of small calls in the documentation are those of the newest record."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/small_calls.jsonl").read_text("utf-8").splitlines()[-1])["rows"]


def test_the_documentation_has_the_figures_of_the_record():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())
    ratios = [row["ratio"] for row in ROWS]
    above = [row for row in ROWS if row["ratio"] > 1.03]
    groups = defaultdict(list)
    for row in ROWS:
        groups[row["kind"], row["form"], row["mode"]].append(row["ratio"])
    medians = [statistics.median(each) for each in groups.values()]
    assert f"{len(ratios)} calls took between {min(ratios):.2f} and {max(ratios):.2f} of `torch.nn`'s time" in text
    assert f"the median {statistics.median(ratios):.2f}. {len(above)} of them are above the target of 1.03" in text
    assert f"form of the call and mode, the median over the sizes is at most {max(medians):.2f}." in text

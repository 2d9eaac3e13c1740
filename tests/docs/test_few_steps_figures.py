"""The figures of calls of a few steps in the documentation are those of the newest record."""

import json
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/results/few_steps.jsonl").read_text("utf-8").splitlines()[-1])


def test_the_documentation_has_the_figures_of_the_record():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())
    rows, loops = RECORD["rows"], [row for row in RECORD["rows"] if row["chosen"]]
    ratios, several = [row["ratio"] for row in loops], [row["ratio"] for row in loops if row["T"] > 1]
    assert RECORD["judged"]
    assert f"{len(rows)} calls were drawn after the fit. The loop is chosen in {len(loops)} of them" in text
    assert f"which take {min(ratios):.2f} to {max(ratios):.2f} of oneDNN's time (geometric mean" in text
    assert f"(geometric mean {geometric_mean(ratios):.2f}); those of more than one step are {len(several)}" in text
    assert f"more than one step are {len(several)} ({geometric_mean(several):.2f})" in text

    def over_the_faster(place_of):
        return f"{geometric_mean([row['us'][place_of(row)] / min(row['us']) for row in rows]):.2f}"

    chosen, first, second = map(over_the_faster, (lambda row: row["chosen"], lambda row: 0, lambda row: 1))
    assert f"the choice takes {chosen} times as long, always oneDNN {first} and always the loop {second} times" in text

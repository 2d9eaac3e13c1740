"""The figures of cells on a CPU in the documentation are those of the newest record."""

import json
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/cells_on_cpu.jsonl").read_text("utf-8").splitlines()[-1])["rows"]


def test_the_documentation_has_the_figures_of_the_record():
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())

    def ends_and_mean(T, mode):
        ratios = [row["ratio"] for row in ROWS if (row["T"], row["mode"]) == (T, mode)]
        return f"{min(ratios):.2f} to {max(ratios):.2f}", f"{geometric_mean(ratios):.2f}"

    ends, means = zip(*(ends_and_mean(T, mode) for T in (50, 8, 1) for mode in ("inference", "training")), strict=True)
    assert f"take {ends[0]} of the loop's time for 50 steps in inference (geometric mean {means[0]})" in text
    assert f"and {ends[1]} in training ({means[1]}); for 8 steps {ends[2]} ({means[2]})" in text
    assert f"for 8 steps {ends[2]} ({means[2]}) and {ends[3]} ({means[3]})" in text
    assert f"A call of a single step takes {ends[4]} of the time in inference ({means[4]})" in text
    assert f"and {ends[5]} in training ({means[5]})" in text
    pairs = [row["us"] for row in ROWS if [row[key] for key in ("mode", "T", "B", "H")] == ["inference", 1, 1, 64]]
    more, loop = [ours - theirs for theirs, ours in pairs], [theirs for theirs, _ in pairs]
    assert f"{min(more):.0f} to {max(more):.0f} us more for one sequence and 64 units" in text
    assert f"which take the loop {min(loop):.0f} to {max(loop):.0f} us" in text

"""The page about the kernels states how good the choices of tilings are, as the record of timed loops has them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.loops import tiling_weights
from benchmarks.loops.tilings import problem_of
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.contract.device import Device
from gatewise.contract.ranking import weights
from gatewise.kernels.persistent.sizes.tiling import Tiling
from gatewise.kernels.persistent.sizes.tiling_choice import tiling

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "kernel-internals.md").read_text("utf-8")
PAGE = " ".join(TEXT.split())
LINES = [json.loads(line) for line in (ROOT / "benchmarks/results/tilings.jsonl").read_text("utf-8").splitlines()]


def of_ranking(ranking):
    """Return the line of the table, of the cases with several tilings that were timed with their pauses."""
    timed = [line for line in LINES if "refit" in line]
    lines = [line for line in map(tiling_weights.as_ranked_now, timed) if line["ranking"] == ranking]
    cases, present = tiling_weights.cases_of(lines), weights(Device.named("h200"), ranking)
    choices = [tiling_weights.choice_of(case, rows, present, 1.98) for case, rows in cases.items()]
    ratios = [choice.clocks[choice.presently] / min(choice.clocks) for choice in choices]
    mean = tiling_weights.geometric(ratios)
    return f"| {ranking.removeprefix('persistent ')} | {len(ratios)} | {mean:.3f} | {max(ratios):.2f} |"


def test_how_much_longer_the_chosen_loops_take():
    block = TEXT.split("<!-- figures: tilings -->\n")[1].split("<!-- /figures: tilings -->")[0]
    rankings = [
        f"persistent {layers}{name} {number}"
        for number in ("16-bit", "TF32")
        for layers in ("", "wide ")
        for name in ("forward", "backward")
    ]
    assert block.splitlines()[2:] == [of_ranking(ranking) for ranking in rankings]


def test_how_long_loops_of_the_refitted_weights_take():
    told = []
    for name in ("forward", "backward"):
        ranking = f"persistent wide {name} 16-bit"
        cases = tiling_weights.cases_of(
            [line for line in LINES if line.get("refit") == "fresh, last fit" and line["ranking"] == ranking]
        )
        ratios = [rows[1]["us_a_step"] / rows[0]["us_a_step"] for rows in cases.values()]
        told.append(f"{tiling_weights.geometric(ratios):.3f}{{}} in {len(ratios)} {name} passes")
    assert f"take {told[0].format(' of the time')} and {told[1].format('')}" in PAGE


def test_how_long_calls_of_the_refitted_weights_take():
    record = (ROOT / "benchmarks/results/pauses.jsonl").read_text("utf-8").splitlines()
    calls = [line for line in map(json.loads, record) if line["set"] == "refit"]
    ratios = [call["us"] / call["us_before"] for call in calls]
    ends = f"{tiling_weights.geometric(ratios):.2f} of the time before ({min(ratios):.2f} to {max(ratios):.2f};"
    assert f"It changes {len(ratios)} of the measured calls, which take {ends}" in PAGE


def test_how_long_loops_by_warpgroups_take():
    found, batches = [], []
    # Tilings with a field `eights` are of a later record, which has other tilings beside them.
    cases = [
        line
        for line in LINES
        if line["ranking"] == "persistent forward 16-bit by warpgroups" and "eights" not in line["tiling"]
    ]
    for case in dict.fromkeys(line["case"] for line in cases):
        problem = problem_of(case, PRECISIONS["bf16"])
        chosen = tiling(problem.hidden_size, problem.batch, 1, Device.named("h200"), False)
        if chosen is None or not chosen.warpgroups:
            continue
        of_chosen = next(each for each in cases if each["case"] == case and Tiling(**each["tiling"]) == chosen)
        before = min(
            each["us_a_step"]
            for each in LINES
            if (each["case"], each["ranking"]) == (case, "persistent forward 16-bit")
            and "eights" not in each["tiling"]
            and each["date"] == of_chosen["date"]
            and each["device"] == of_chosen["device"]
        )
        found.append(of_chosen["us_a_step"] / before)
        batches.append(problem.batch)
    told = (
        "In the {} cases timed on an H200 in which a tiling with warpgroups is chosen, with {} to {} sequences, the "
        "loop takes {:.2f} to {:.2f} of the time of the tiling that was chosen before (geometric mean {:.2f}"
    )
    shares = min(found), max(found), tiling_weights.geometric(found)
    assert told.format(len(found), min(batches), max(batches), *shares) in PAGE

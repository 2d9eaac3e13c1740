"""`benchmarks.loops`: tilings are forced in turn, and weights are fitted to the times of their loops."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.loops import tiling_weights
from benchmarks.loops import tilings as timed
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError
from gatewise.contract.ranking import weights as present_weights
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.launches.builds import launches_of

DEVICE = Device.named("h200").replace(compiles=True)
CASES = ("100-16-264", "100-64-512", "50-256-512", "35-128-480", "100-64-320", "35-20-448")


def plan_of(case, dtype="bf16", most=6):
    problem = timed.problem_of(case, PRECISIONS[dtype])
    return problem, {
        name: timed.ranked(problem, DEVICE, backward=backward, most=most) for name, backward in timed.PASSES.items()
    }


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("100-64-512", "bf16"), ("100-64-512", "tf32"), ("100-64-512", "fp32"), ("35-128-1500", "bf16")],
)
def test_the_first_tiling_is_the_one_that_is_chosen(case, dtype):
    problem, plan = plan_of(case, dtype)
    chosen = {launch.tiling.backward: launch.tiling for launch in launches_of(problem, DEVICE)}
    assert {False: plan["forward"][0], True: plan["backward"][0]} == chosen


def test_passes_are_launched_in_the_forced_tilings_and_then_in_their_own():
    problem, plan = plan_of("35-128-1500")
    own = [launch.tiling for launch in launches_of(problem, DEVICE)]
    pairs = list(timed.in_pairs(plan))
    assert len(pairs) == 6
    for cuts in pairs:
        with timed.forced(cuts):
            assert [launch.tiling for launch in launches_of(problem, DEVICE)] == [cuts[False], cuts[True]]
    with pytest.raises(RuntimeError), timed.forced(pairs[3]):
        raise RuntimeError
    assert [launch.tiling for launch in launches_of(problem, DEVICE)] == own
    assert compiled.tiling.__name__ == "tiling"


def lines_by(weights, most=20):
    """Return the lines of a record in which loops take the clock cycles of these weights at 2 GHz."""
    found = []
    for case in CASES:
        problem, plan = plan_of(case, most=most)
        for rank, cut in enumerate(plan["backward"]):
            clocks = cut.rounds * tiling_weights.clocks_by(weights, cut.quantities())
            microseconds = problem.time * clocks / 2000
            found.append(timed.line_of(case, "backward", rank, cut, microseconds, PRECISIONS["bf16"], DEVICE))
    return [json.loads(json.dumps(line)) for line in found]


def test_weights_are_fitted_that_choose_the_fastest():
    ranking = "persistent backward 16-bit"
    present = {name: weight for name, weight in present_weights(DEVICE, ranking).items() if name != "few_warps"}
    weights = present | {"traffic": 10 * present["traffic"]}
    lines = lines_by(weights)
    *report, last = tiling_weights.report(lines, ghz=2.0)
    fitted = json.loads(last)
    assert fitted["ranking"] == ranking
    assert fitted["device"] == "NVIDIA H200"
    assert fitted["weights"]["traffic"] > present["traffic"]
    printed = "\n".join(report)
    shown = {name: float(ratio) for name, ratio in re.findall(r"  (present|fitted): ([0-9.]+) of the fastest", printed)}
    assert shown["fitted"] - 1 < (shown["present"] - 1) / 2
    assert f"{len(lines)} loops of {len(CASES)} cases" in printed
    assert len(lines) > 100


def test_weights_on_which_no_choice_depends_stay():
    choice = tiling_weights.Choice("one", [1.0, 2.0], [{"a": 1, "b": 5}, {"a": 2, "b": 5}], 0)
    fitted = tiling_weights.fit([choice], ["a", "b"], {"a": 2.0, "b": 0.001})
    assert fitted == {"a": pytest.approx(2.0, rel=0.1), "b": pytest.approx(0.001, rel=0.3)}


def test_the_choices_of_other_weights_are_timed_beside_the_present_ones(tmp_path):
    problem, plan = plan_of("35-128-1500", most=20)
    weights = {"steps": 1.0}  # as few rounds as possible, however long they take
    line = {"ranking": "persistent wide backward 16-bit", "weights": weights}
    (tmp_path / "new.jsonl").write_text(json.dumps(line))
    planned = timed.planned(problem, DEVICE, {}, tmp_path / "new.jsonl")
    assert planned["forward"] == plan["forward"][:1]
    first, other = planned["backward"]
    assert first == plan["backward"][0]
    assert other.clocks_by(weights) < first.clocks_by(weights)
    rows = [
        timed.line_of("35-128-1500", "backward", rank, cut, time, PRECISIONS["bf16"], DEVICE)
        for rank, (cut, time) in enumerate([(first, 70.0), (other, 35.0)])
    ]
    (printed,) = tiling_weights.report(rows)
    assert "1 other choices take 0.500 of the time: 35-128-1500 bf16 NVIDIA H200 0.50" in printed


def test_drawn_cases_are_the_same_for_a_seed_and_have_tilings():
    cases = timed.drawn_cases(5, 3, PRECISIONS["tf32"], DEVICE)
    assert cases == timed.drawn_cases(5, 3, PRECISIONS["tf32"], DEVICE)
    assert cases != timed.drawn_cases(5, 4, PRECISIONS["tf32"], DEVICE)
    assert all(plan_of(case, "tf32", 1)[1]["backward"] for case in cases)


@pytest.mark.parametrize("case", ["100-64", "a-b-c", ""])
def test_a_case_of_another_form_is_refused(case):
    with pytest.raises(ArgumentError, match="`--case` must be T-B-H"):
        timed.problem_of(case, PRECISIONS["bf16"])

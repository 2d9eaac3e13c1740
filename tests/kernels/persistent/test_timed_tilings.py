"""`benchmarks.loops.tilings`: tilings are forced in turn, and weights are fitted to the times of their loops."""

from __future__ import annotations

import json

import pytest

from benchmarks.loops import tilings as timed
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError
from gatewise.contract.ranking import weights as present_weights
from gatewise.kernels.persistent.launches import compiled
from gatewise.kernels.persistent.launches.builds import launches_of

DEVICE = Device.named("h200").replace(compiles=True)
CASES = ("100-16-256", "100-64-512", "50-256-512", "35-128-1500", "100-64-1024", "35-20-650")


def plan_of(case, dtype="bf16", most=6):
    problem = timed.problem_of(case, PRECISIONS[dtype])
    return problem, {
        name: timed.ranked(problem, DEVICE, backward=backward, most=most) for name, backward in timed.PASSES.items()
    }


@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
def test_the_first_tiling_is_the_one_that_is_chosen(dtype):
    problem, plan = plan_of("100-64-512", dtype)
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
            clocks = cut.rounds * timed.clocks_by(weights, cut.quantities())
            microseconds = problem.time * clocks / 2000
            found.append(timed.line_of(case, "backward", rank, cut, microseconds, PRECISIONS["bf16"], DEVICE))
    return [json.loads(json.dumps(line)) for line in found]


def test_weights_are_found_again_and_choose_the_fastest():
    names = [name for name in present_weights(DEVICE, "persistent backward 16-bit") if name != "few_warps"]
    weights = {name: 1.3 * present_weights(DEVICE, "persistent backward 16-bit")[name] for name in names}
    weights |= {"sends": 0.0, "cells": 300.0}
    lines = lines_by(weights)
    *_, last = timed.report(lines, ghz=2.0)
    fitted = json.loads(last)
    assert fitted["ranking"] == "persistent backward 16-bit"
    assert fitted["device"] == "NVIDIA H200"
    for line in lines:
        quantities = line["quantities"]
        assert timed.clocks_by(fitted["weights"], quantities) == pytest.approx(
            timed.clocks_by(weights, quantities), rel=0.01
        )
    printed = "\n".join(timed.report(lines, ghz=2.0))
    assert "fitted: 1.000 of the fastest, at most 1.00" in printed
    assert f"{len(lines)} loops of {len(CASES)} cases" in printed
    assert len(lines) > 100
    assert "present: 1.000" not in printed


def test_a_weight_is_never_negative():
    choice = timed.Choice("one", [1.0, 2.0, 3.0], [{"a": 1, "b": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 1}], 0)
    assert timed.fit([choice], ["a", "b"]) == {"a": pytest.approx(1.0), "b": pytest.approx(0.0, abs=1e-9)}
    rising = timed.Choice("one", [3.0, 2.0, 1.0], [{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 3, "b": 1}], 0)
    fitted = timed.fit([rising], ["a", "b"])
    assert fitted["a"] == 0
    assert fitted["b"] > 0


@pytest.mark.parametrize("case", ["100-64", "a-b-c", ""])
def test_a_case_of_another_form_is_refused(case):
    with pytest.raises(ArgumentError, match="`--case` must be T-B-H"):
        timed.problem_of(case, PRECISIONS["bf16"])

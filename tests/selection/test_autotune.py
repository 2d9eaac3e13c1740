"""The policy "measure" runs the kernels, prefers the one with the least measured time, and stores the times."""

import itertools
import json

import pytest
import torch

from gatewise.cells import SHIPPED
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.selection import autotune, decide, use_kernel
from tests.pairwise import exhaustive_unless

CPU = Device.probe("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GATEWISE_CACHE", str(tmp_path))
    autotune._measured.cache_clear()
    return tmp_path / "measured.json"


def test_every_accepting_kernel_is_measured_and_remembered(cache):
    problem = Problem(3, 2, 4, 5, needs_grad=True)
    with use_kernel("auto", policy="measure"):
        decision = decide(problem, CPU)
    accepted = [verdict for verdict in decision.verdicts if verdict.accepted]
    assert all(verdict.measured for verdict in accepted)
    assert decision.verdict(decision.chosen).seconds == min(verdict.seconds for verdict in accepted)
    assert "measured" in str(decision)
    (times,) = json.loads(cache.read_text()).values()
    assert set(times) == {verdict.kernel for verdict in accepted}


def test_remembered_times_decide_without_running(cache, monkeypatch):
    problem = Problem(3, 2, 4, 5)
    autotune.measured(problem, CPU)
    ((key, times),) = json.loads(cache.read_text()).items()
    cache.write_text(json.dumps({key: dict.fromkeys(times, 9.0) | {"eager": 1.0}}))
    autotune._measured.cache_clear()
    monkeypatch.setattr(autotune, "_time", lambda *_: pytest.fail("measured again"))
    assert autotune.measured(problem, CPU).chosen == "eager"


def test_neighbouring_batch_sizes_share_a_measurement(cache, monkeypatch):
    autotune.measured(Problem(3, 5, 4, 5), CPU)
    monkeypatch.setattr(autotune, "_time", lambda *_: pytest.fail("measured again"))
    autotune.measured(Problem(4, 8, 4, 5), CPU)


# Of every second cell with resets.
@pytest.mark.parametrize(
    ("cell", "resets"),
    exhaustive_unless(
        [*zip(SHIPPED, itertools.cycle([False, True]), strict=False)][::3], itertools.product(SHIPPED, [False, True])
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_every_cell_can_be_measured(cell, resets):
    problem = Problem(3, 2, 4, 5, num_layers=2, needs_grad=True, cell=cell, resets=resets)
    assert autotune._time("eager", problem, CPU) > 0
    decision = autotune.measured(problem, CPU)
    compared = [verdict.measured for verdict in decision.verdicts if verdict.accepted]
    assert compared in ([False], [True, True])  # a single kernel is not measured


@pytest.mark.parametrize("layout", [Layout.PACKED, Layout.HOST_LENGTHS])
def test_ragged_problems_are_measured_in_a_layout_each_kernel_reads(layout):
    decision = autotune.measured(Problem(3, 2, 4, 5, num_layers=2, dropout=0.5, needs_grad=True, layout=layout), CPU)
    assert decision.verdict("aten").measured
    assert decision.verdict("eager").measured


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_a_broken_cache_is_measured_anew(cache, content):
    cache.write_text(content)
    assert autotune.measured(Problem(3, 2, 4, 5), CPU).chosen


def test_an_unwritable_cache_costs_nothing_else(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("GATEWISE_CACHE", str(blocked / "below"))
    assert autotune.measured(Problem(3, 2, 4, 5, dtype=torch.float64), CPU).chosen

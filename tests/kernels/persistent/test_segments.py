"""Cuts of a sequence for the lean passes."""

import itertools

import pytest
import torch

from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.kernel import persistent
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.persistent.sizes.memory import lean_cut, lean_forward_pieces
from gatewise.kernels.persistent.sizes.segments import Segment, evenly, in_order, mirrored, parted, visited_together
from tests.pairwise import each_value

TIMES = [1, 2, 3, 4, 5, 7, 31, 100, 191, 320, 321, 500, 1000, 70_001]
COUNTS = [1, 2, 3, 4, 5, 15]


@pytest.mark.parametrize(("count", "time"), each_value([*itertools.product(COUNTS, TIMES)]), ids=str)
def test_every_step_is_in_one_segment(time, count):
    pieces = evenly(time, count)
    assert sum(pieces) == time
    assert min(pieces) > 0
    for direction in range(2):
        segments = sorted(own[direction] for own in visited_together(pieces, 2))
        assert [step for own in segments for step in range(own.start, own.stop)] == list(range(time))


@pytest.mark.parametrize(("count", "time"), each_value([*itertools.product(COUNTS, TIMES)]), ids=str)
def test_both_directions_cut_in_the_same_places(time, count):
    pieces = evenly(time, count)
    assert pieces == pieces[::-1]
    assert len(pieces) - min(count, time) in (0, 1)
    assert max(pieces) * len(pieces) < time + 2 * len(pieces)


def test_directions_begin_at_either_end():
    assert visited_together((2, 2, 2), 2) == [((0, 2), (4, 6)), ((2, 4), (2, 4)), ((4, 6), (0, 2))]
    assert visited_together((1, 2, 3), 2) == [((0, 1), (5, 6)), ((1, 3), (3, 5)), ((3, 6), (0, 3))]
    assert visited_together((3, 3), 1) == [((0, 3),), ((3, 6),)]


def test_parts_of_a_segment():
    assert parted(Segment(2, 8), Segment(0, 2)) == [((2, 8), False)]
    assert parted(Segment(2, 8), Segment(0, 5)) == [((2, 5), True), ((5, 8), False)]
    assert parted(Segment(2, 8), Segment(4, 9)) == [((2, 4), False), ((4, 8), True)]
    assert parted(Segment(2, 8), Segment(0, 9)) == [((2, 8), True)]


def chosen(problem):
    problem = problem.replace(needs_grad=True, lean=True)
    cut = lean_cut(problem)
    return len(cut.rebuilt), len(cut.kept), len(lean_forward_pieces(problem))


PLAIN = Problem(100, 64, 512, 512, dtype=torch.bfloat16)
LEAN = PLAIN.replace(needs_grad=True, lean=True)


def test_there_are_as_few_as_memory_allows():
    assert chosen(PLAIN) == (2, 1, 2)
    # Among many weights, or layers, gates are a smaller part of all.
    assert chosen(PLAIN.replace(batch=8)) == (1, 0, 1)
    # More would take more: gradients of matrices that are rounded up add up beside the others.
    assert chosen(Problem(35, 20, 1500, 1500, num_layers=2)) == (1, 0, 1)


@pytest.mark.parametrize("problem", [LEAN, LEAN.replace(time=33, batch=100)], ids=str)
def test_as_many_gates_are_kept_as_memory_allows(problem):
    cut = lean_cut(problem)
    assert cut.kept
    assert max(cut.rebuilt) <= cut.kept_steps  # gates that are made again take the place of kept ones
    more = in_order(problem.time, cut.kept_steps + 1, len(cut.rebuilt), len(cut.kept))
    allowed = memory._allowed(problem) - memory._UNSPLIT
    assert memory._lean(problem, cut, True) <= allowed < memory._lean(problem, more, True)


@pytest.mark.parametrize(("rebuilt", "kept"), [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("time", [6, 40, 41, 320])
def test_a_mirrored_cut_is_the_same_from_either_end(time, rebuilt, kept):
    found = [mirrored(time, steps, rebuilt, kept) for steps in range(1, time)]
    for cut in filter(None, found):
        assert (len(cut.rebuilt), len(cut.kept), sum(cut.pieces)) == (rebuilt, kept, time)
        assert cut.pieces == cut.pieces[::-1]
        assert min(cut.pieces) > 0
    assert any(found) or (time % 2 == 1 and (rebuilt + kept) % 2 == 0)


def test_a_cut_is_chosen_by_what_it_was_weighed(monkeypatch):
    weights = ranking.weights(Device.named("h200"), "persistent segments")
    changed = {"segment": 0.0, "weight_bytes": 1e15}
    monkeypatch.setattr(ranking, "weights", lambda device, name: {**weights, **changed})
    lean_cut.cache_clear()
    assert lean_cut(LEAN).segments > 3
    changed["segment"] = 1.0
    lean_cut.cache_clear()
    assert lean_cut(LEAN).segments == 3  # fewer leave no room
    lean_cut.cache_clear()


def test_more_segments_take_less(cut):
    found = []
    for count in (1, 2, 5):
        cut(count)
        found.append(persistent.workspace_bytes(LEAN, Device.named("h200")))
    assert found == sorted(found, reverse=True)

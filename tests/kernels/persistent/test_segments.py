"""Cuts of a sequence for the lean passes."""

import pytest
import torch

from gatewise.contract.problem import Problem
from gatewise.kernels.persistent.memory import forward_segment_count, segment_count, workspace_bytes
from gatewise.kernels.persistent.segments import longest, segments, visited_together

TIMES = [1, 2, 3, 4, 5, 7, 31, 100, 191, 320, 321, 500, 1000, 70_001]
COUNTS = [1, 2, 3, 4, 5, 15]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("time", TIMES)
def test_every_step_is_in_one_segment(time, count):
    steps = [step for segment in segments(time, count) for step in range(segment.start, segment.stop)]
    assert steps == list(range(time))
    assert all(segment.steps > 0 for segment in segments(time, count))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("time", TIMES)
def test_both_directions_cut_in_the_same_places(time, count):
    cuts = segments(time, count)
    assert [segment.steps for segment in cuts] == [segment.steps for segment in reversed(cuts)]
    assert len(cuts) - min(count, time) in (0, 1)
    assert longest(time, count) * len(cuts) < time + 2 * len(cuts)


def test_directions_begin_at_either_end():
    assert visited_together(6, 3, 2) == [((0, 2), (4, 6)), ((2, 4), (2, 4)), ((4, 6), (0, 2))]
    assert visited_together(6, 2, 1) == [((0, 3),), ((3, 6),)]


def counts(problem):
    problem = problem.replace(needs_grad=True, lean=True)
    return segment_count(problem), forward_segment_count(problem)


def test_there_are_as_few_as_memory_allows():
    plain = Problem(100, 64, 512, 512, dtype=torch.bfloat16)
    assert counts(plain) == (3, 1)
    assert counts(plain.replace(time=1000)) == (3, 2)
    # Among many weights, or layers, gates are a smaller part of all.
    assert counts(plain.replace(batch=8)) == (1, 1)
    assert counts(plain.replace(num_layers=2, bidirectional=True)) == (2, 1)
    # More would take more: gradients of matrices that are rounded up add up beside the others.
    assert counts(Problem(35, 20, 1500, 1500, num_layers=2)) == (1, 1)


def test_more_segments_take_less(cut):
    problem = Problem(100, 64, 512, 512, dtype=torch.bfloat16, needs_grad=True, lean=True)
    found = []
    for count in (1, 2, 5):
        cut(count)
        found.append(workspace_bytes(problem))
    assert found == sorted(found, reverse=True)

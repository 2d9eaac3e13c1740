"""The choice among combinations, compared with brute force, and the effect of larger budgets."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gatewise.planning.choose import Shape, Step, choices, least, within
from gatewise.planning.peak import peak
from gatewise.planning.way import Part, Way

sizes = st.integers(0, 100)


@st.composite
def steps(draw):
    """Steps of one to three shapes with the same parts, whose ways have the same names."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))

    def way(index):
        return Way(f"way {index}", "", draw(st.integers(0, 5)) / 4, draw(sizes), draw(sizes), draw(sizes))

    return [
        Step(
            Shape(shape, 1, 1),
            (("weights", draw(sizes)),),
            tuple(
                Part(f"part {place}", tuple(way(index) for index in range(count)), draw(sizes))
                for place, count in enumerate(counts)
            ),
        )
        for shape in range(draw(st.integers(1, 3)))
    ]


@given(steps(), st.integers(0, 600))
def test_the_fastest_that_fits_is_found(steps, budget):
    fitting = []
    for indices in itertools.product(*(range(len(part.ways)) for part in steps[0].parts)):
        chosen = [[part.ways[index] for part, index in zip(step.parts, indices, strict=True)] for step in steps]
        most = max(peak(step.at_rest[0][1], step.parts, ways).bytes for step, ways in zip(steps, chosen, strict=True))
        if most <= budget:
            fitting.append(sum(way.seconds for ways in chosen for way in ways))
    found = within(choices(steps), budget)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found.seconds == min(fitting)
        assert found.peak.bytes <= budget
        assert found.step.peak(found.ways) == found.peak


@settings(max_examples=200)
@given(steps(), st.integers(0, 600), st.integers(0, 600))
def test_a_larger_budget_never_gives_a_slower_plan(steps, one, other):
    found = choices(steps)
    small, large = (within(found, budget) for budget in sorted((one, other)))
    if small is not None:
        assert large is not None
        assert large.seconds <= small.seconds


@given(steps())
def test_the_least_fits_and_nothing_less_does(steps):
    found = choices(steps)
    smallest = least(found).peak.bytes
    assert within(found, smallest) is not None
    assert within(found, smallest - 1) is None
    assert within(found, None) is found[0]


def test_a_way_must_be_there_at_every_shape():
    def step(source, *names):
        ways = tuple(Way(name, seconds=index, kept=9 - index) for index, name in enumerate(names))
        return Step(Shape(source, 1, 1), (), (Part("part", ways),))

    found = choices([step(1, "kept", "again"), step(2, "kept")])
    assert [choice.ways[0].name for choice in found] == ["kept"]
    # Equally fast: the one that needs less comes first.
    assert [choice.ways[0].name for choice in choices([step(1, "kept", "again")])] == ["kept", "again"]

"""The peak of a step: by hand, and against a simulation of every allocation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gatewise.planning.peak import BACKWARD, FORWARD, UPDATE, peak
from gatewise.planning.way import Part, Way

sizes = st.integers(0, 1000)
ways = st.builds(Way, st.just("way"), kept=sizes, forward_scratch=sizes, backward_scratch=sizes)
parts = st.lists(
    st.builds(lambda way, gradients, held: Part("part", (way,), gradients, held), ways, sizes, st.booleans()),
    max_size=6,
)


def test_two_parts_by_hand():
    below = Part("below", (Way("only", kept=10, forward_scratch=5, backward_scratch=7),), gradients=3)
    above = Part("above", (Way("only", kept=20, forward_scratch=1, backward_scratch=2),), gradients=4)
    # Forward 115, 131; backward 136, then 100 + 10 + 4 + 3 + 7 = 124; the update 107.
    found = peak(100, [below, above], [below.ways[0], above.ways[0]])
    assert found == (136, "above", BACKWARD)


def test_each_phase_can_be_the_one_that_needs_most():
    def phase(way, gradients=0, update=0):
        part = Part("part", (way,), gradients)
        return peak(0, [part], [way], update).phase

    assert phase(Way("way", kept=1, forward_scratch=9)) == FORWARD
    assert phase(Way("way", kept=1, backward_scratch=9)) == BACKWARD
    assert phase(Way("way", kept=1), gradients=2, update=9) == UPDATE


@given(st.integers(0, 10**6), parts, sizes)
def test_it_is_the_most_that_is_alive_in_a_simulated_step(at_rest, parts, update):
    ways = [part.ways[0] for part in parts]
    alive, most = at_rest, at_rest

    def allocate(count):
        nonlocal alive, most
        alive += count
        most = max(most, alive)

    for way in ways:
        allocate(way.kept)
        allocate(way.forward_scratch)
        alive -= way.forward_scratch
    held: list[int] = []
    for part, way in zip(reversed(parts), reversed(ways), strict=True):
        allocate(way.backward_scratch)
        allocate(part.gradients)
        alive -= way.backward_scratch
        held.append(way.kept)
        if not part.with_below:
            alive -= sum(held)
            held.clear()
    allocate(update)
    assert peak(at_rest, parts, ways, update).bytes == most
    assert alive - update == at_rest + sum(part.gradients for part in parts) + sum(held)

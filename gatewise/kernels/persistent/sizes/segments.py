"""How a sequence is cut for the lean passes: pure arithmetic on its length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Steps `start` to `stop`, without the last."""

    start: int
    stop: int

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return self.stop - self.start


class Cut(NamedTuple):
    """The segments of a backward pass, as their steps, in the order in which the forward pass visits them.

    Attributes:
        rebuilt: Those whose gates are made again.
        kept: Those whose gates the forward pass keeps: it visits them last, and the backward pass first.
    """

    rebuilt: tuple[int, ...]
    kept: tuple[int, ...] = ()

    @property
    def pieces(self) -> tuple[int, ...]:
        """All of them."""
        return self.rebuilt + self.kept

    @property
    def segments(self) -> int:
        """How many there are."""
        return len(self.rebuilt) + len(self.kept)

    @property
    def longest(self) -> int:
        """Steps of the longest one."""
        return max(self.pieces)

    @property
    def kept_steps(self) -> int:
        """Steps whose gates are kept."""
        return sum(self.kept)


def evenly(time: int, count: int) -> tuple[int, ...]:
    """Return the steps of at most so many segments of a sequence, as many from either end.

    So one direction can take a segment in the order of time and the other its mirror image, and both cut the sequence
    in the same places. For that an odd number of steps is cut into an odd number of segments, one more than asked for
    if need be.
    """
    count = min(count, time)
    count += time % 2 and count % 2 == 0
    steps, left = divmod(time, count)
    sizes = [steps + (index < left // 2) for index in range(count // 2)]
    return (*sizes, *[steps + left % 2] * (count % 2), *reversed(sizes))


def in_order(time: int, kept_steps: int, rebuilt: int, kept: int) -> Cut | None:
    """Return a cut into so many segments of each kind; None if there are not as many steps."""
    if time - kept_steps < rebuilt or kept_steps < kept:
        return None
    return Cut(_in_parts(time - kept_steps, rebuilt), _in_parts(kept_steps, kept))


def mirrored(time: int, kept_steps: int, rebuilt: int, kept: int) -> Cut | None:
    """Return such a cut that is the same from either end, or None.

    Both directions then cut the sequence in the same places, as with `evenly`.
    """
    least = in_order(time, kept_steps, rebuilt, kept)
    between = time - 2 * (kept_steps if rebuilt > kept else time - kept_steps)
    if least is None or between < 0 or (between == 0) != (rebuilt == kept):
        return None
    middle = evenly(between, abs(rebuilt - kept)) if between else ()
    if len(middle) != abs(rebuilt - kept):
        return None
    if rebuilt > kept:
        return Cut((*reversed(least.kept), *middle), least.kept)
    return Cut(least.rebuilt, (*middle, *reversed(least.rebuilt)))


def _in_parts(steps: int, count: int) -> tuple[int, ...]:
    return tuple((steps + index) // count for index in reversed(range(count)))


def visited_together(pieces: Sequence[int], directions: int) -> list[tuple[Segment, ...]]:
    """Return the segments of each direction that one launch takes, first those where the directions begin."""
    stops = list(itertools.accumulate(pieces))
    forward = [Segment(stop - steps, stop) for stop, steps in zip(stops, pieces, strict=True)]
    if directions == 1:
        return [(own,) for own in forward]
    return [(own, Segment(stops[-1] - own.stop, stops[-1] - own.start)) for own in forward]


def parted(own: Segment, other: Segment) -> list[tuple[Segment, bool]]:
    """Return the parts of a segment, and whether each lies in another one."""
    inside = Segment(max(own.start, other.start), min(own.stop, other.stop))
    if inside.steps <= 0:
        return [(own, False)]
    parts = [(Segment(own.start, inside.start), False), (inside, True), (Segment(inside.stop, own.stop), False)]
    return [part for part in parts if part[0].steps]

"""The segments of a sequence for gradient checkpointing, by arithmetic on its length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """The time steps from `start` up to, but not including, `stop`."""

    start: int
    stop: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.stop - self.start


class Cut(NamedTuple):
    """The numbers of steps of a backward pass's segments, in the order in which the forward pass visits them.

    Attributes:
        rebuilt: The steps of each segment whose gates are recomputed.
        kept: The steps of each segment whose gates the forward pass keeps. It visits these segments last, and the
            backward pass visits them first.
    """

    rebuilt: tuple[int, ...]
    kept: tuple[int, ...] = ()

    @property
    def pieces(self) -> tuple[int, ...]:
        """The steps of each segment."""
        return self.rebuilt + self.kept

    @property
    def segments(self) -> int:
        """The number of segments."""
        return len(self.rebuilt) + len(self.kept)

    @property
    def longest(self) -> int:
        """The steps of the longest segment."""
        return max(self.pieces)

    @property
    def kept_steps(self) -> int:
        """The number of steps whose gates are kept."""
        return sum(self.kept)


def evenly(time: int, count: int) -> tuple[int, ...]:
    """Return the steps of at most `count` segments of a sequence; their sizes are the same in reverse order.

    When one direction visits a segment in the order of time and the other its mirror image, both then cut the sequence
    at the same steps. Therefore an odd number of steps is cut into an odd number of segments, if need be one more than
    asked for.
    """
    count = min(count, time)
    count += time % 2 and count % 2 == 0
    steps, left = divmod(time, count)
    sizes = [steps + (index < left // 2) for index in range(count // 2)]
    return (*sizes, *[steps + left % 2] * (count % 2), *reversed(sizes))


def in_order(time: int, kept_steps: int, rebuilt: int, kept: int) -> Cut | None:
    """Return a cut into `rebuilt` and `kept` segments; None if there are fewer steps."""
    if time - kept_steps < rebuilt or kept_steps < kept:
        return None
    return Cut(_in_parts(time - kept_steps, rebuilt), _in_parts(kept_steps, kept))


def mirrored(time: int, kept_steps: int, rebuilt: int, kept: int) -> Cut | None:
    """Return a cut as `in_order` does whose sizes are the same in reverse order; None if there is none.

    Both directions then cut the sequence at the same steps, as with `evenly`.
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
    """Return the segments that each launch of the forward pass computes, one for each direction."""
    stops = list(itertools.accumulate(pieces))
    forward = [Segment(stop - steps, stop) for stop, steps in zip(stops, pieces, strict=True)]
    if directions == 1:
        return [(own,) for own in forward]
    return [(own, Segment(stops[-1] - own.stop, stops[-1] - own.start)) for own in forward]


def parted(own: Segment, other: Segment) -> list[tuple[Segment, bool]]:
    """Return a segment in parts that are inside or outside of another segment, and whether each is inside."""
    inside = Segment(max(own.start, other.start), min(own.stop, other.stop))
    if inside.steps <= 0:
        return [(own, False)]
    parts = [(Segment(own.start, inside.start), False), (inside, True), (Segment(inside.stop, own.stop), False)]
    return [part for part in parts if part[0].steps]

"""How a sequence is cut for the lean passes: pure arithmetic on its length."""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """Steps `start` to `stop`, without the last."""

    start: int
    stop: int

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return self.stop - self.start


def segments(time: int, count: int) -> list[Segment]:
    """Return the segments of a sequence, as many steps from either end.

    So a launch can take one segment in the order of time and its mirror image in the reverse order, and both directions
    cut the sequence in the same places. For that an odd number of steps is cut into an odd number of segments, one more
    than asked for if need be.
    """
    count = min(count, time)
    count += time % 2 and count % 2 == 0
    steps, left = divmod(time, count)
    sizes = [steps + (index < left // 2) for index in range(count // 2)]
    sizes = [*sizes, *[steps + left % 2] * (count % 2), *reversed(sizes)]
    stops = [sum(sizes[: index + 1]) for index in range(count)]
    return [Segment(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def longest(time: int, count: int) -> int:
    """Return the steps of the longest segment."""
    return max(segment.steps for segment in segments(time, count))


def visited_together(time: int, count: int, directions: int) -> list[tuple[Segment, ...]]:
    """Return the segments of each direction that one launch takes, first those where the directions begin."""
    cuts = segments(time, count)
    return list(zip(cuts, reversed(cuts), strict=True)) if directions == 2 else [(own,) for own in cuts]

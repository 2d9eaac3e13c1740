"""The largest memory of a training step: its parts forward, then backward, then the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gatewise.planning.way import Part, Way

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Peak(NamedTuple):
    """Where a step needs most.

    Attributes:
        bytes: How much, all told.
        part: Name of the part that is being computed; empty in the update.
        phase: `FORWARD`, `BACKWARD` or `UPDATE`.
    """

    bytes: int
    part: str
    phase: str


def peak(at_rest: int, parts: Sequence[Part], ways: Sequence[Way], update_scratch: int = 0) -> Peak:
    """Return the peak of a step whose parts are computed in these ways.

    Forward, what is kept adds up. Backward, a part's gradients come and what it kept goes.

    Args:
        at_rest: Bytes between two steps: parameters, the optimizer's state, what libraries hold.
        parts: In the order of the forward pass.
        ways: One for each part.
        update_scratch: Bytes that the optimizer needs besides, while it runs.
    """
    live, found = at_rest, Peak(at_rest, "", UPDATE)
    for part, way in zip(parts, ways, strict=True):
        live += way.kept
        found = max(found, Peak(live + way.forward_scratch, part.name, FORWARD), key=lambda each: each.bytes)
    waiting = 0
    for part, way in zip(reversed(parts), reversed(ways), strict=True):
        during = live + part.gradients + way.backward_scratch
        found = max(found, Peak(during, part.name, BACKWARD), key=lambda each: each.bytes)
        waiting += way.kept
        live += part.gradients - (0 if part.with_below else waiting)
        waiting = waiting if part.with_below else 0
    return max(found, Peak(live + update_scratch, "", UPDATE), key=lambda each: each.bytes)

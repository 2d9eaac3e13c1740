"""The peak memory of a training step: its parts forward, then backward, then the optimizer's update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gatewise.planning.way import Part, Way

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Peak(NamedTuple):
    """The peak memory of a step and where it occurs.

    Attributes:
        bytes: The peak memory in bytes.
        part: The name of the part that is being computed; empty in the update.
        phase: The phase: `FORWARD`, `BACKWARD` or `UPDATE`.
    """

    bytes: int
    part: str
    phase: str


def peak(at_rest: int, parts: Sequence[Part], ways: Sequence[Way], update_scratch: int = 0) -> Peak:
    """Return the peak memory of a step whose parts are computed in the given ways.

    In the forward pass, kept memory accumulates. In the backward pass, each part adds its gradients and releases what
    it kept.

    Args:
        at_rest: The memory in bytes between two steps: parameters, the optimizer's state, memory held by libraries.
        parts: The parts, in the order of the forward pass.
        ways: The way of each part.
        update_scratch: The additional workspace in bytes of the optimizer's update.
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

"""Echo's rule: which recomputation is worth the memory that it saves.

Source: Zheng et al., "Echo: Compiler-based GPU Memory Footprint Reduction for LSTM RNN Training", ISCA 2020.
"""

from __future__ import annotations

from gatewise.planning.way import Part, Way

NEARLY_FREE = 0.05
"""The maximum fraction of a step's time that repeated matrix products may take."""


def admitted(part: Part, step_seconds: float) -> tuple[Way, ...]:
    """Return the ways of a part that the rule allows; the first way is always allowed.

    A way that recomputes must release more memory than it additionally keeps, and may repeat matrix products only if
    they take a negligible share of the step's time. A way that is no slower than the first is always allowed.

    Args:
        part: The part.
        step_seconds: The predicted time of a whole step in the fastest ways.
    """
    usual = part.ways[0]
    return tuple(
        way for way in part.ways if way is usual or way.seconds <= usual.seconds or is_worthwhile(way, step_seconds)
    )


def is_worthwhile(way: Way, step_seconds: float) -> bool:
    """Return whether a way recomputes nothing, or its recomputation meets the rule."""
    again = way.recomputation
    if again is None:
        return True
    return again.released > again.newly_kept and again.product_seconds <= NEARLY_FREE * step_seconds

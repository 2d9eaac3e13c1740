"""Echo's rule: what may be computed a second time to keep less.

Source: Zheng et al., "Echo: Compiler-based GPU Memory Footprint Reduction for LSTM RNN Training", ISCA 2020.
"""

from __future__ import annotations

from gatewise.planning.way import Part, Way

NEARLY_FREE = 0.05
"""Largest share of a step's time that repeated matrix products may take."""


def admitted(part: Part, step_seconds: float) -> tuple[Way, ...]:
    """Return the ways of a part that the rule allows: the first one always.

    A way that computes something again must release more than it newly keeps, and repeat no matrix product unless
    that is nearly free. One that is no slower than keeping everything needs no such reason.

    Args:
        part: The part.
        step_seconds: Predicted time of a whole step in the fastest ways.
    """
    usual = part.ways[0]
    return tuple(
        way for way in part.ways if way is usual or way.seconds <= usual.seconds or is_worthwhile(way, step_seconds)
    )


def is_worthwhile(way: Way, step_seconds: float) -> bool:
    """Tell whether a way computes nothing again, or what it computes again meets the rule."""
    again = way.recomputation
    if again is None:
        return True
    return again.released > again.newly_kept and again.product_seconds <= NEARLY_FREE * step_seconds

"""The check that a loss stays within the spread of three seeds of nn.LSTM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

WINDOW = 25  # the number of steps whose losses are averaged
SEEDS = 3
_NEAR = 3  # the number of windows before and after
_LEARNT = 0.98  # relative to the first loss: a comparison of models that learn nothing would always pass


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A loss trajectory compared with those of nn.LSTM.

    Attributes:
        worst: The largest distance from nn.LSTM with the same seed, relative to the spread of its seeds there.
        note: The error; empty if nothing is wrong.
    """

    worst: float
    note: str = ""


def verdict(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Verdict:
    """Compare trajectories with those of nn.LSTM.

    A trajectory is compared with that of nn.LSTM with the same seed, from which it differs by rounding. With dropout, a
    seed gives different masks on each kernel, so the means over several seeds are compared.

    Args:
        ours: The losses of each step, with the first seed, or with each seed.
        theirs: The losses of nn.LSTM, with each seed.
    """
    for curve in ours:
        broken = next((step for step, loss in enumerate(curve) if not math.isfinite(loss)), None)
        if broken is not None:
            return Verdict(math.inf, f"the loss is {curve[broken]} after {broken} steps")
    mine, others = [smoothed(curve) for curve in ours], [smoothed(curve) for curve in theirs]
    first, last = others[0][0], others[0][-1]
    if not last < _LEARNT * first:
        return Verdict(math.inf, f"nn.LSTM learns nothing: its loss goes from {first:.4g} to {last:.4g}")
    own, expected = (mine[0], others[0]) if len(mine) == 1 else (_mean(mine), _mean(others))
    spread = [max(pair) for pair in zip(_range(mine), _range(others), strict=True)]
    # The spread of a single window is small if curves happen to cross there.
    around = [max(spread[max(0, place - _NEAR) : place + _NEAR + 1]) for place in range(len(spread))]
    shares = [abs(a - b) / most for a, b, most in zip(own, expected, around, strict=True)]
    worst = max(shares)
    if worst <= 1:
        return Verdict(worst)
    place = shares.index(worst)
    return Verdict(
        worst,
        f"around step {place * WINDOW} the loss is {own[place]:.5g}, nn.LSTM's {expected[place]:.5g}, "
        f"which {SEEDS} seeds spread over {around[place]:.2g}",
    )


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*curves, strict=True)]


def _range(curves: Sequence[Sequence[float]]) -> list[float]:
    return [max(values) - min(values) for values in zip(*curves, strict=True)]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each window."""
    return [
        sum(losses[first : first + WINDOW]) / len(losses[first : first + WINDOW])
        for first in range(0, len(losses), WINDOW)
    ]

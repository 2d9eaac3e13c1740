"""Whether a loss stays within the spread of three seeds of nn.LSTM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

WINDOW = 25  # steps whose losses are averaged
SEEDS = 3
_LEARNT = 0.98  # of the first loss: a curve that shows nothing cannot fail


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A trajectory beside those of nn.LSTM.

    Attributes:
        worst: The largest distance from nn.LSTM with the same seed, as a share of the spread of its seeds there.
        note: What is wrong; empty where nothing is.
    """

    worst: float
    note: str = ""


def verdict(ours: Sequence[float], theirs: Sequence[Sequence[float]]) -> Verdict:
    """Hold a trajectory to those of nn.LSTM.

    Args:
        ours: The loss of each step, with the first seed.
        theirs: The losses of nn.LSTM, of each seed.
    """
    broken = next((step for step, loss in enumerate(ours) if not math.isfinite(loss)), None)
    if broken is not None:
        return Verdict(math.inf, f"the loss is {ours[broken]} after {broken} steps")
    own, others = smoothed(ours), [smoothed(curve) for curve in theirs]
    if not others[0][-1] < _LEARNT * others[0][0]:
        return Verdict(
            math.inf, f"nn.LSTM learns nothing: its loss goes from {others[0][0]:.4g} to {others[0][-1]:.4g}"
        )
    spread = [max(values) - min(values) for values in zip(*others, strict=True)]
    # That of a window alone is small where curves happen to cross.
    around = [max(spread[max(0, place - 1) : place + 2]) for place in range(len(spread))]
    shares = [abs(a - b) / most for a, b, most in zip(own, others[0], around, strict=True)]
    worst = max(shares)
    if worst <= 1:
        return Verdict(worst)
    place = shares.index(worst)
    return Verdict(
        worst,
        f"around step {place * WINDOW} the loss is {own[place]:.5g}, nn.LSTM's {others[0][place]:.5g}, "
        f"which {SEEDS} seeds spread over {around[place]:.2g}",
    )


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each window."""
    return [
        sum(losses[first : first + WINDOW]) / len(losses[first : first + WINDOW])
        for first in range(0, len(losses), WINDOW)
    ]

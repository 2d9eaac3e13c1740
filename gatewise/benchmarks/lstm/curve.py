"""The loss of a layer over a few training steps, which is compared with PyTorch's before anything is timed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gatewise.benchmarks.curve import Curve, Nudge, Rival, descent
from gatewise.benchmarks.lstm.side import Side


def rival(side: Side, rounding: float, exact: Callable[[], Side]) -> Rival:
    """Return the losses of PyTorch's layer from the weights of a case, with which others are compared.

    Args:
        side: The side of PyTorch's layer.
        rounding: The rounding unit of the precision, relative to a number.
        exact: A function that returns the same layer in float64.
    """
    return Rival(lambda nudge: losses(side, nudge=nudge), rounding, rounding, exact=lambda: losses(exact()))


def losses(side: Side, *, replayed: bool = False, nudge: Nudge | None = None) -> Curve:
    """Train a side for a few steps, restore its weights, and return the loss before each step.

    Args:
        side: The layer to train.
        replayed: Whether the forward and backward pass are replayed as a CUDA graph.
        nudge: The random change of the weights before the first step; None for no change.
    """
    side.prepare(True)

    def output() -> Tensor:
        side.forget()
        return side.padded(side.call()[0])

    shape = side.padded(side.given[0]).shape
    found = descent(output, shape, list(side.module.parameters()), replayed=replayed, nudge=nudge)
    side.forget()
    return found

"""The loss of a layer over a few steps of training, held to that of PyTorch's layer before anything is timed."""

from __future__ import annotations

from torch import Tensor

from gatewise.benchmarks.curve import Curve, Nudge, Rival, descent
from gatewise.benchmarks.lstm.side import Side


def rival(side: Side, rounding: float) -> Rival:
    """Return the loss of PyTorch's layer, from the weights of a case, as what others are held to.

    Args:
        side: The side of PyTorch's layer.
        rounding: The spacing of the precision's numbers, relative to them.
    """
    return Rival(lambda nudge: losses(side, nudge=nudge), rounding, rounding)


def losses(side: Side, *, replayed: bool = False, nudge: Nudge | None = None) -> Curve:
    """Train a side for a few steps and return its loss before each; its weights are as before afterwards.

    Args:
        side: The layer to train.
        replayed: Whether the forward and backward pass are replayed as a CUDA graph.
        nudge: A function that moves the weights slightly before the first step; None leaves them.
    """
    side.prepare(True)

    def output() -> Tensor:
        side.forget()
        return side.padded(side.call()[0])

    shape = side.padded(side.given[0]).shape
    found = descent(output, shape, list(side.module.parameters()), replayed=replayed, nudge=nudge)
    side.forget()
    return found

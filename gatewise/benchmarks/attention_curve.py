"""The loss of attention over a few steps of training, which is held to plain PyTorch's before it is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatewise.attention.call import Inputs
from gatewise.benchmarks.curve import Curve, Nudge, Rival, descent

Attend = Callable[[Inputs], Tensor]


def rival(compute: Attend, inputs: Inputs) -> Rival:
    """Return the loss of plain PyTorch as what others are held to.

    Args:
        compute: Plain PyTorch's attention.
        inputs: The inputs that are timed.
    """
    rounding = torch.finfo(inputs.query.dtype).eps
    return Rival(lambda nudge: losses(compute, inputs, nudge=nudge), rounding, rounding, "plain torch")


def losses(compute: Attend, inputs: Inputs, *, replayed: bool = False, nudge: Nudge | None = None) -> Curve:
    """Train the inputs for a few steps and return the loss before each; they are as before afterwards.

    Args:
        compute: Computes the context [T, B, V] from the inputs.
        inputs: The inputs that are timed; those that need gradients are trained.
        replayed: Whether the forward and backward pass are replayed as a CUDA graph.
        nudge: A function that moves the inputs slightly before the first step; None leaves them.
    """
    leaves = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    shape = torch.Size((*inputs.query.shape[:-1], inputs.values.shape[-1]))
    return descent(lambda: compute(inputs), shape, leaves, replayed=replayed, nudge=nudge)

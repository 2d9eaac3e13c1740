"""The loss of attention over a few training steps, which is compared with plain PyTorch's before anything is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatewise.attention.call import Inputs
from gatewise.benchmarks.curve import Curve, Nudge, Rival, descent

Attend = Callable[[Inputs], Tensor]


def rival(compute: Attend, inputs: Inputs) -> Rival:
    """Return the losses of plain PyTorch, with which others are compared.

    Args:
        compute: The attention of plain PyTorch.
        inputs: The inputs of the timed calls.
    """
    rounding = torch.finfo(inputs.query.dtype).eps
    return Rival(lambda nudge: losses(compute, inputs, nudge=nudge), rounding, rounding, "plain torch")


def losses(compute: Attend, inputs: Inputs, *, replayed: bool = False, nudge: Nudge | None = None) -> Curve:
    """Train the inputs for a few steps, restore them, and return the loss before each step.

    Args:
        compute: A function that computes the context [T, B, V] from the inputs.
        inputs: The inputs of the timed calls; those that need gradients are trained.
        replayed: Whether the forward and backward pass are replayed as a CUDA graph.
        nudge: The random change of the inputs before the first step; None for no change.
    """
    leaves = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    shape = torch.Size((*inputs.query.shape[:-1], inputs.values.shape[-1]))
    return descent(lambda: compute(inputs), shape, leaves, replayed=replayed, nudge=nudge)

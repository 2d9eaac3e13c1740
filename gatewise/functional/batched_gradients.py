"""The backward pass for several gradients at once, as `torch.autograd.grad(is_grads_batched=True)` asks for it.

PyTorch then gives a backward pass tensors with a hidden dimension, for which few of its operators have rules, and the
kernels none. The pass runs once for each of the gradients instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_LEVELS = range(63, 0, -1)  # PyTorch numbers hidden dimensions from 1 on, and has at most 63

Gradients = Sequence[Tensor | None]

Backward = Callable[[Gradients, bool], Gradients]
"""A backward pass: from the gradients of the outputs, and whether another pass follows, to those of the inputs."""


def one_by_one(backward: Backward, gradients: Gradients, follows: bool = False) -> Gradients:
    """Return the results of a backward pass, batched if the gradients of the outputs are.

    Args:
        backward: The backward pass, which is never given batched gradients.
        gradients: The gradients of the outputs.
        follows: Whether another pass follows this one.
    """
    batched = [one for one in gradients if one is not None and is_batched(one)]
    if not batched:
        return backward(gradients, follows)
    # The highest level first, because PyTorch restores them from the lowest on.
    level = next(level for level in _LEVELS if any(len(_apart(one, level)) for one in batched))
    count = max(len(_apart(one, level)) for one in batched)
    runs = []
    for index in range(count):
        # A gradient without this hidden dimension is the same in every run.
        run = [one if one is None or not len(_apart(one, level)) else _apart(one, level)[index] for one in gradients]
        runs.append(one_by_one(backward, run, follows or index < count - 1))
    return [
        None if each[0] is None else torch._add_batch_dim(torch.stack(each), 0, level)
        for each in zip(*runs, strict=True)
    ]


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor has a hidden dimension."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)  # type: ignore[attr-defined]


def _apart(tensor: Tensor, level: int) -> Tensor:
    """Return a tensor with its hidden dimension of a level as the first one, or of size 0 if it has none."""
    return torch._remove_batch_dim(tensor, level, 0, 0)

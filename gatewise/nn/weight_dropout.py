"""Weight dropout: dropout of the recurrent weights, as in the AWD-LSTM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gatewise.contract.tracing import is_compiling


def with_dropped_weights(weights: Sequence[Tensor], per_direction: int, rate: float) -> tuple[Tensor, ...]:
    """Return the weights with new dropout masks on the recurrent matrices.

    The masks are drawn by PyTorch's generator on the device of the weights, so that every replay of a CUDA graph draws
    new ones. Kernels read the dropped matrices as any other weights.

    Args:
        weights: The weights in PyTorch's flat order.
        per_direction: The number of tensors of one direction of one layer; the second one is the recurrent matrix.
        rate: The probability of dropping an element; the others are multiplied by 1 / (1 - rate).
    """
    found = list(weights)
    for place in range(1, len(found), per_direction):
        found[place] = _dropped(found[place], rate)
    return tuple(found)


def _dropped(weight: Tensor, rate: float) -> Tensor:
    # The masks are the same in every dtype, and torch.func.vmap takes no random function that works in place.
    like = torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)
    kept = torch.bernoulli(like, 1.0 - rate)
    scale = 1.0 / (1.0 - rate)
    differentiated_forward = not is_compiling() and forward_ad._current_level >= 0
    if differentiated_forward or torch.jit.is_tracing():  # the operator below has no forward derivative, nor in ONNX
        return weight * kept * scale
    # The same in one launch; torch.nn.functional.dropout rounds the scale to float32 for float64 too.
    return torch.ops.aten.native_dropout_backward(weight, kept, scale)

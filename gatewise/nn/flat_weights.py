"""The buffer in cuDNN's order that contains all parameters of a layer on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gatewise.contract.pytorch import MODES
from gatewise.contract.weights import in_one_buffer


def flatten(layer: Any, mode: str, names: Sequence[str], per_direction: int) -> None:
    """Move a layer's parameters into one buffer in cuDNN's order, where cuDNN can read them.

    Nothing happens off CUDA, without cuDNN, where the parameters lie in such a buffer already, or when they are
    parametrised, tied to each other, of a tensor subclass or of several dtypes.

    Args:
        layer: A layer for which PyTorch has one too.
        mode: The `mode` of PyTorch's layer.
        names: The names of its parameters in PyTorch's flat order.
        per_direction: The parameters of one direction of one layer.
    """
    found = [layer._parameters.get(name) for name in names]
    weights: list[Tensor] = [weight for weight in found if type(weight) is nn.Parameter and _uses_cudnn(weight)]
    if len(weights) < len(found):
        return
    if len({(weight.dtype, weight.device) for weight in weights}) > 1:
        return
    if len({weight.data_ptr() for weight in weights}) < len(weights):
        return
    if in_one_buffer(weights, per_direction) or not torch._use_cudnn_rnn_flatten_weight():
        return
    # The operator writes the new storage into the parameters, which autograd must not see.
    with torch.cuda.device_of(weights[0]), torch.no_grad():
        torch._cudnn_rnn_flatten_weight(
            weights,
            per_direction,
            layer.input_size,
            MODES[mode].cudnn_mode,
            layer.hidden_size,
            layer.proj_size,
            layer.num_layers,
            layer.batch_first,
            layer.bidirectional,
        )


def _uses_cudnn(weight: Tensor) -> bool:
    # torch.backends.cudnn.is_acceptable is False for bfloat16, although PyTorch's calls of cuDNN support it.
    cudnn = torch.backends.cudnn
    return weight.is_cuda and weight.dtype.is_floating_point and cudnn.enabled and cudnn.is_available()

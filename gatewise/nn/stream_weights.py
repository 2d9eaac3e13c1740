"""The cell and the weights of a layer, as its streams read them in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gatewise.cells import Cell
from gatewise.contract.pytorch import MODES
from gatewise.functional.one_step import Product
from gatewise.nn.pytorch_layer import weights_of


def cell_in_evaluation(layer: Any) -> Cell:
    """Return the cell of a layer, as in evaluation mode."""
    return MODES[layer.mode].cell if isinstance(layer, nn.RNNBase) else layer.cell_in(training=False)


def step_weights_of(layer: Any, dtype: torch.dtype | None) -> tuple[list[Any], list[Product] | None]:
    """Return the weights of each layer, and the functions of the recurrent products if these are not of one matrix.

    Args:
        layer: The layer.
        dtype: The dtype of products that are made without the matrix; None for matrices in any case.
    """
    if isinstance(layer, nn.RNNBase):
        flat = weights_of(layer)
        each = len(flat) // layer.num_layers
        return [flat[start : start + each] for start in range(0, len(flat), each)], None
    return (layer.all_weights, None) if dtype is None else layer.weights_of_step(dtype)


def flat_weights_of(layer: Any, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Return the weights in the flat order of PyTorch's layers, converted to a dtype if one is given."""
    flat: Sequence[Tensor] = weights_of(layer) if isinstance(layer, nn.RNNBase) else layer.flat_weights()
    return flat if dtype is None else [weight.to(dtype) for weight in flat]


def converted(weights: list[Any], dtype: torch.dtype | None) -> list[Any]:
    """Return the weights of each layer in a dtype; None leaves them as they are."""
    return weights if dtype is None else [[weight.to(dtype) for weight in each] for each in weights]

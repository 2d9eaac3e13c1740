"""The state that a model passes from batch to batch: None, a tensor, or tuples of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def detach(state: Any) -> Any:
    """Detach the tensors of a state from the autograd graph; a named tuple becomes a tuple."""
    if isinstance(state, torch.Tensor):
        return state.detach()
    return None if state is None else tuple(detach(part) for part in state)


def flatten(state: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the tensors of a state, and its structure as JSON values: an index, null, or lists of these."""
    leaves: list[torch.Tensor] = []

    def visit(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, torch.Tensor):
            leaves.append(part)
            return len(leaves) - 1
        return [visit(each) for each in part]

    shape = visit(state)
    return leaves, shape


def indices_of(shape: Any) -> list[int]:
    """Return the indices of the tensors in a structure that `flatten` returned."""
    if shape is None:
        return []
    return [shape] if isinstance(shape, int) else [index for part in shape for index in indices_of(part)]


def unflatten(leaves: Mapping[int, torch.Tensor], shape: Any) -> Any:
    """Rebuild a state with this structure from its tensors by index."""
    if shape is None:
        return None
    if isinstance(shape, int):
        return leaves[shape]
    return tuple(unflatten(leaves, each) for each in shape)

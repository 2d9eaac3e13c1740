"""The tensors in the inputs and outputs of a model."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(nested: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists, dictionaries and dataclasses, in their order."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(nested):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found

"""Tokens to vectors, with dropout: no choice, but kept."""

from __future__ import annotations

from torch import nn

from gatewise.planning.translation.setting import Setting
from gatewise.planning.way import Part, Way

_NUMBER = 4  # bytes: embeddings are looked up, and dropped, in float32 whatever products are in


def embedding(name: str, table: nn.Embedding, steps: int, setting: Setting, *, counted: bool) -> Part:
    """Return the part of an embedding.

    Args:
        name: Of the part.
        table: The embedding.
        steps: Tokens of the longest row.
        setting: The step.
        counted: Whether the gradient of the table is counted elsewhere, because weights are tied.
    """
    numbers = steps * setting.shape.batch * table.embedding_dim
    whole = table.weight.numel() * table.weight.itemsize
    dropped = setting.mask_bytes(numbers, setting.model.dropout.p)
    way = Way(
        "embedding",
        "looked up",
        kept=numbers * setting.dtype.itemsize + dropped,
        forward_scratch=_NUMBER * numbers,
        # The gradient of what was looked up, before and after dropout; that of tied weights is added to another.
        backward_scratch=2 * _NUMBER * numbers + counted * whole,
    )
    return Part(name, (way,), gradients=0 if counted else whole)

"""The part of an embedding with dropout, for which there is only one way."""

from __future__ import annotations

from torch import nn

from gatewise.planning.translation.setting import Setting
from gatewise.planning.way import Part, Way

_NUMBER = 4  # bytes: embeddings and their dropout are in float32, whatever the dtype of products


def embedding(name: str, table: nn.Embedding, steps: int, setting: Setting, *, counted: bool) -> Part:
    """Return the part of an embedding.

    Args:
        name: The name of the part.
        table: The embedding.
        steps: The number of tokens of the longest sequence.
        setting: The step.
        counted: Whether the gradient of the table is counted in another part, because weights are tied.
    """
    numbers = steps * setting.shape.batch * table.embedding_dim
    whole = table.weight.numel() * table.weight.itemsize
    dropped = setting.mask_bytes(numbers, setting.model.dropout.p)
    # The factors of tokens: of the vocabulary, and of the tokens of the batch, which the backward pass reads.
    factors = _NUMBER * (table.num_embeddings + steps * setting.shape.batch) * bool(setting.model.word_dropout)
    way = Way(
        "embedding",
        "embedding lookup",
        kept=numbers * setting.dtype.itemsize + dropped + factors,
        forward_scratch=_NUMBER * numbers,
        # The gradient of the embeddings before and after dropout; that of tied weights is added to another one.
        backward_scratch=2 * _NUMBER * numbers + counted * whole,
    )
    return Part(name, (way,), gradients=0 if counted else whole)

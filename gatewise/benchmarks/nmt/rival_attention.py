"""Additive attention of one decoder step, in a few lines of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AdditiveAttention(nn.Module):
    """Additive attention over the source for one decoder step.

    Args:
        hidden_size: The number of features of queries, source positions and the score.
        layer_norm: Whether the score has a layer norm before its tanh.
    """

    def __init__(self, hidden_size: int, layer_norm: bool) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size) if layer_norm else nn.Identity()
        self.score = nn.Linear(hidden_size, 1, bias=False)

    def keys(self, values: Tensor) -> Tensor:
        """Return the keys, with which every step compares its query, from values [B, S, H]."""
        return self.key(values)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, beyond: Tensor) -> Tensor:
        """Return the context [B, H] of a query [B, H]; `beyond` [B, S] is True at source positions that are padding."""
        scores = self.score(torch.tanh(self.norm(self.query(query)[:, None] + keys))).squeeze(-1)
        weights = torch.softmax(scores.masked_fill(beyond, -torch.inf), -1)
        return torch.bmm(weights[:, None].to(values.dtype), values).squeeze(1)

"""The description of one attention call as sizes, dtypes and flags, without any tensor.

The letters are those of `gatewise.contract.problem` and the following:

| letter | meaning |
|---|---|
| `T` | decoder steps, each with a query |
| `S` | source positions, each with a key and a value |
| `B` | sequences in the batch |
| `H` | features that a score is a sum over |
| `Q` | features of a query before the weight of the general score; otherwise `H` |
| `V` | features of a value, and of a context |
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from gatewise.contract.hashing import hash_once


class Score(enum.Enum):
    """The function that compares a query with a key."""

    ADDITIVE = "additive"  # v . tanh(query + key); Bahdanau et al.
    DOT = "dot"  # query . key
    GENERAL = "general"  # (query W) . key; Luong et al.; also called bilinear


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The description of an attention call. It is hashable, so that choices can be cached and tested without a GPU.

    Attributes:
        steps: The number of decoder steps, T.
        source: The number of source positions, S.
        batch: The batch size, B.
        hidden_size: The number of features in a score, H.
        value_size: The number of features of a value, V.
        score: The function that compares a query with a key.
        query_size: The number of features of a query, Q, for the general score; 0 for the others, whose queries have H.
        layer_norm: Whether query + key is normalised over its features before the tanh.
        ragged: Whether the source has a length for each sequence.
        dtype: The dtype of every tensor.
        needs_grad: Whether a backward pass may follow.
        allow_tf32: Whether float32 products may be rounded to TF32 (from the PyTorch settings).
    """

    steps: int
    source: int
    batch: int
    hidden_size: int
    value_size: int
    score: Score = Score.ADDITIVE
    query_size: int = 0
    layer_norm: bool = False
    ragged: bool = False
    dtype: torch.dtype = torch.float32
    needs_grad: bool = False
    allow_tf32: bool = False
    _hash: int | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self)

    @property
    def additive(self) -> bool:
        """Whether the score has a feature map."""
        return self.score is Score.ADDITIVE

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no step, position, sequence or value."""
        return 0 in (self.steps, self.source, self.batch, self.value_size)

    @property
    def pairs(self) -> int:
        """The number of scores: one for each decoder step, sequence and source position."""
        return self.steps * self.batch * self.source

    @property
    def map_bytes(self) -> int:
        """The size in bytes of the additive score's feature map [T, S, B, H]; 0 for the other scores."""
        return self.pairs * self.hidden_size * self.dtype.itemsize if self.additive else 0

    def replace(self, **changes: object) -> Problem:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        """Return one line: score, sizes, dtype and every flag that differs from its default."""
        sizes = f"T {self.steps}, S {self.source}, B {self.batch}, H {self.hidden_size}, V {self.value_size}"
        extras = [
            f"Q {self.query_size}" if self.query_size else "",
            "layer norm" if self.layer_norm else "",
            "lengths" if self.ragged else "",
            str(self.dtype).removeprefix("torch."),
            "TF32 allowed" if self.allow_tf32 and self.dtype == torch.float32 else "",
            "training" if self.needs_grad else "inference",
        ]
        return ", ".join([f"{self.score.value} attention", sizes, *filter(None, extras)])

"""One attention call as sizes, dtypes and flags, without any tensor.

The legend of `gatewise.contract.problem`, and what attention adds to it:

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
    """How well a query goes with a key."""

    ADDITIVE = "additive"  # v . tanh(query + key), Bahdanau's
    DOT = "dot"  # query . key
    GENERAL = "general"  # (query W) . key, Luong's; also called bilinear


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What is asked of an attention kernel: hashable, so that choices can be cached and tested without a GPU.

    Attributes:
        steps: T.
        source: S.
        batch: B.
        hidden_size: H.
        value_size: V.
        score: How query and key are compared.
        query_size: Q; 0 where there is no weight, and queries have H features.
        layer_norm: Whether query + key is normalised over its features before the tanh.
        ragged: Whether the source has a length for each sequence.
        dtype: Of every tensor.
        needs_grad: Whether a backward pass may follow.
        allow_tf32: Whether float32 products may be rounded to TF32 (the user's PyTorch settings).
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
    def pairs(self) -> int:
        """Scores: one for each decoder step, sequence and source position."""
        return self.steps * self.batch * self.source

    @property
    def map_bytes(self) -> int:
        """Bytes of the feature map [T, S, B, H] of the additive score; 0 for the others, which have none."""
        return self.pairs * self.hidden_size * self.dtype.itemsize if self.additive else 0

    def replace(self, **changes: object) -> Problem:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        """One line: score, sizes, dtype and every flag that differs from the plain case."""
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

"""The order of the tokens [T, B] of a sequence in memory: step by step, or row by row as with `batch_first`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.kernels.cuda.scratch import Scratch


class Tokens(NamedTuple):
    """The number of tokens and their order in memory.

    Attributes:
        time: The number of time steps T.
        batch: The batch size B.
        by_row: Whether the steps of a batch row are neighbours in memory, instead of the rows of a step.
    """

    time: int
    batch: int
    by_row: bool

    @property
    def step(self) -> int:
        """The distance from one step to the next, in tokens."""
        return 1 if self.by_row else self.batch

    @property
    def row(self) -> int:
        """The distance from one batch row to the next, in tokens."""
        return self.time if self.by_row else 1

    def new(self, like: Tensor | Scratch, *planes: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor [*planes, T, B, width] in this order, allocated by `like.new_empty`."""
        if self.by_row:
            return like.new_empty((*planes, self.batch, self.time, width), dtype=dtype).transpose(-3, -2)
        return like.new_empty((*planes, self.time, self.batch, width), dtype=dtype)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return a tensor [T, B, width] as [tokens, width] in this order; it is copied only if its order differs."""
        ordered = tensor.transpose(0, 1) if self.by_row else tensor
        return ordered.reshape(self.time * self.batch, tensor.shape[-1])

    def unflat(self, matrix: Tensor) -> Tensor:
        """Return a matrix [tokens, width] in this order as a view [T, B, width]."""
        if self.by_row:
            return matrix.unflatten(0, (self.batch, self.time)).transpose(0, 1)
        return matrix.unflatten(0, (self.time, self.batch))

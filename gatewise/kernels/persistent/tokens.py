"""In which order the tokens [T, B] of a call lie in memory: step by step, or row by row as with `batch_first`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import driver
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launch import on
from gatewise.kernels.persistent.plan import hidden_of

_LARGEST = 2**31  # the kernels count the values of a row's tokens in 32 bits


class Tokens(NamedTuple):
    """An order of tokens.

    Attributes:
        time: T.
        batch: B.
        by_row: Whether all steps of a row lie side by side, instead of all rows of a step.
    """

    time: int
    batch: int
    by_row: bool

    @property
    def step(self) -> int:
        """Tokens from one step to the next."""
        return 1 if self.by_row else self.batch

    @property
    def row(self) -> int:
        """Tokens from one row to the next."""
        return self.time if self.by_row else 1

    def new(self, like: Tensor | Scratch, *planes: int, width: int) -> Tensor:
        """Return an unwritten tensor [*planes, T, B, width] in this order, taken from `like.new_empty`."""
        if self.by_row:
            return like.new_empty(*planes, self.batch, self.time, width).transpose(-3, -2)
        return like.new_empty(*planes, self.time, self.batch, width)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return a tensor [T, B, width] as [tokens, width] in this order; a copy only if it is in another."""
        ordered = tensor.transpose(0, 1) if self.by_row else tensor
        return ordered.reshape(self.time * self.batch, tensor.shape[-1])

    def unflat(self, matrix: Tensor) -> Tensor:
        """Return a matrix [tokens, width] in this order as [T, B, width]."""
        if self.by_row:
            return matrix.unflatten(0, (self.batch, self.time)).transpose(0, 1)
        return matrix.unflatten(0, (self.time, self.batch))


def order_of(x: Tensor, problem: Problem) -> Tokens:
    """Return the order in which a tensor [T, B, ...] need not be copied; step by step if neither fits."""
    time, batch = x.shape[:2]
    if x.is_contiguous():
        return Tokens(time, batch, by_row=False)
    # What a compiled call keeps must have the strides that were predicted for it. Lean passes cut between steps.
    far = time * batch * 4 * hidden_of(problem.hidden_size) >= _LARGEST
    if problem.traced or problem.rebuilds_gates or far:
        return Tokens(time, batch, by_row=False)
    return Tokens(time, batch, by_row=x.transpose(0, 1).is_contiguous())


def order_of_kept(kept: Tensor) -> Tokens:
    """Return the order in which the gates or cells [D, T, B, ...] of a forward pass were kept."""
    _, time, batch, _ = kept.shape
    return Tokens(time, batch, by_row=kept.stride(1) < kept.stride(2))


def order_of_outputs(y: Tensor) -> Tokens:
    """Return the order of the outputs [T, B, ...] of a forward pass."""
    (time, batch), (step, row) = y.shape[:2], y.stride()[:2]
    return Tokens(time, batch, by_row=step < row)


def fill_unwritten(buffer: Tensor) -> Tensor:
    """Fill a tensor without gaps with the pattern that means "not yet written" to the kernels, and return it."""
    with on(buffer.device):
        driver.fill_with_ones(buffer)
    return buffer

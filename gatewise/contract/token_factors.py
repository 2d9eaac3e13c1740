"""Gradients of weights that an autograd node leaves as the factors of a matrix product over tokens.

The gradient of a weight matrix [M, K] is the product of two matrices with a row for each of N tokens: the gradients of
what the weight computes [N, M], and what it is multiplied with [N, K]. While tokens are few, the factors are fewer
bytes than the gradient. Processes that train together then send the factors, and each computes the product over the
tokens of all processes, which is the sum of all gradients ("sufficient factor broadcasting", Xie et al., 2016).

An autograd node that can leave such products sets its attribute `token_factors` in the forward pass, to a
`TokenFactors`. Who wants the factors sets the attribute `factor_receiver` of the node before the backward pass, to a
`FactorReceiver`. The backward pass then leaves the factors there, in memory of the receiver or of its own, and returns
None for these gradients: the receiver computes them later. This is only for weights that are leaves of the autograd
graph, and which no other node reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

receiver: ContextVar[FactorReceiver | None] = ContextVar("gatewise_factor_receiver", default=None)
"""The receiver of the backward pass that runs; None if it computes the gradients itself."""

Compute = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A function that returns gradients, computed from factors with any number of tokens."""


class TokenFactors(NamedTuple):
    """The factors that an autograd node can leave in place of gradients.

    Attributes:
        tokens: The number of tokens N.
        widths: The width F of each factor [N, F].
        dtypes: The dtype of each factor.
        weights: The places of the weights among the tensors that the node reads, as in `next_functions`.
        gradients: The dtype of the gradients of these weights.
        flops: The floating-point operations of the products.
        most_tokens: The largest number of tokens, of all processes together, for which the products are computed in the
            same way; None without a limit.
    """

    tokens: int
    widths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    weights: tuple[int, ...]
    gradients: torch.dtype
    flops: int
    most_tokens: int | None = None

    @property
    def nbytes(self) -> int:
        """The size of the factors in bytes."""
        sizes = [width * dtype.itemsize for width, dtype in zip(self.widths, self.dtypes, strict=True)]
        return self.tokens * sum(sizes)


class FactorReceiver:
    """Receives the factors of one node in one backward pass, with memory for those of all processes.

    Args:
        stated: The factors that the node can leave.
        rank: The rank of this process.
        count: The number of processes.
        ready: A function that is called when the node has left the factors: the current stream then has the work for
            them, and not yet that for other gradients of the node.

    Attributes:
        scale: The number by which one factor of each product is multiplied, so that the sum over the processes is a
            mean: one over their number. For powers of two this rounds nothing.
        rooms: The memory for each factor [processes, N, F]; empty before the node has allocated it.
        parts: The factors of this process [N, F], which may be in other memory; empty before the node has left them.
    """

    def __init__(self, stated: TokenFactors, rank: int, count: int, ready: Callable[[], None]) -> None:
        self._stated, self._rank, self._count, self._ready = stated, rank, count, ready
        self._compute: Compute | None = None
        self.scale = 1 / count
        self.rooms: list[Tensor] = []
        self.parts: list[Tensor] = []

    def new(self, like: Tensor) -> list[Tensor]:
        """Return uninitialised memory for the factors of this process [N, F], on the device of a tensor."""
        count, tokens = self._count, self._stated.tokens
        kinds = zip(self._stated.widths, self._stated.dtypes, strict=True)
        self.rooms = [like.new_empty(count, tokens, width, dtype=dtype) for width, dtype in kinds]
        return [room[self._rank] for room in self.rooms]

    def leave(self, compute: Compute, parts: Sequence[Tensor] = ()) -> None:
        """Leave the factors, which the work on the current stream computes.

        Args:
            compute: A function that returns the gradients, in the order of `TokenFactors.weights`, computed from the
                factors of all tokens.
            parts: The factors of this process, contiguous and in the order of `TokenFactors.widths`; nothing if they
                are in the memory from `new`. Nothing may write them before `gradients` has returned.
        """
        self._compute = compute
        self.parts = list(parts) or [room[self._rank] for room in self.rooms]
        self._ready()

    def gradients(self) -> Sequence[Tensor]:
        """Return the gradients, computed on the current stream from the factors of all processes.

        Raises:
            RuntimeError: The node has left no factors.
        """
        if self._compute is None:
            raise RuntimeError("a backward pass has left no factors of the gradients that it said it would leave")
        found = self._compute([room.flatten(0, 1) for room in self.rooms])
        self._compute, self.rooms, self.parts = None, [], []
        return found


def receiver_of(node: Any) -> FactorReceiver | None:
    """Return the receiver of an autograd node; None if its backward pass computes the gradients itself."""
    return getattr(node, "factor_receiver", None)


@contextlib.contextmanager
def received_by(own: FactorReceiver) -> Iterator[None]:
    """Let the backward pass in the block leave its factors to a receiver."""
    token = receiver.set(own)
    try:
        yield
    finally:
        receiver.reset(token)

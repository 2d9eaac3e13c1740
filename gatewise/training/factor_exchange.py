"""The exchange of the factors of gradients, from which each process computes the mean of all processes' gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from gatewise.contract.token_factors import FactorReceiver, TokenFactors
from gatewise.training.processes import Finish, Processes

_FLOPS_OF_A_BYTE = 3000
"""The floating-point operations of a 16-bit matrix product in the time in which NCCL reduces a byte.

Between two H200s, an all-reduce of 36 MB takes 148 us, and products of 6016 x 1504 values with 700 more tokens take 15
us longer (`benchmarks/results/collectives.jsonl` and `product_times.jsonl`): 840 TFLOP/s, and 0.24 TB/s.
"""


class Candidate(NamedTuple):
    """A node of an autograd graph that can leave the factors of gradients.

    Attributes:
        node: The node.
        stated: The factors.
        weights: The leaves that get the gradients.
    """

    node: Any
    stated: TokenFactors
    weights: tuple[torch.Tensor, ...]


class FactorExchange:
    """The exchange of the factors of one node in one backward pass.

    Args:
        processes: The processes.
        candidate: The node, with what it stated.
        ready: A function that is called with each weight when the factors of its gradient have been computed.

    Attributes:
        weights: The leaves whose gradients are computed from the factors.
    """

    def __init__(self, processes: Processes, candidate: Candidate, ready: Callable[[torch.Tensor], None]) -> None:
        self.weights = candidate.weights
        self._processes, self._tell = processes, ready
        self._receiver = FactorReceiver(candidate.stated, processes.rank, processes.count, self._ready)
        self._sent: Finish | None = None
        candidate.node.factor_receiver = self._receiver

    def _ready(self) -> None:
        for weight in self.weights:
            self._tell(weight)

    def start(self) -> None:
        """Send the factors of this process, if this has not been done."""
        if self._sent is None:
            self._sent = self._processes.start_all_gather_into(self._receiver.rooms)

    def finish(self) -> None:
        """Wait for the factors of all processes, and give each weight the mean of the gradients."""
        if self._sent is not None:
            self._sent()
        for weight, gradient in zip(self.weights, self._receiver.gradients(), strict=True):
            weight.grad = gradient


def candidates(
    nodes: Iterable[tuple[Any, Sequence[torch.Tensor | None]]], read_once: Collection[torch.Tensor]
) -> list[Candidate]:
    """Return the nodes that can leave factors of all the gradients of some weights.

    Args:
        nodes: The nodes of an autograd graph, each with the leaves that it reads in the order of `next_functions`; None
            where it reads the result of another node.
        read_once: The weights that are trained and that one node alone reads.
    """
    found = []
    for node, leaves in nodes:
        stated = getattr(node, "token_factors", None)
        if stated is None:
            continue
        weights = [leaves[place] for place in stated.weights]
        if all(each is not None and each in read_once and each.dtype == stated.gradients for each in weights):
            found.append(Candidate(node, stated, tuple(weights)))
    return found


def saves_time(stated: TokenFactors, weights: Sequence[torch.Tensor], count: int, *, bfloat16: bool) -> bool:
    """Return whether sending factors and multiplying those of all processes takes less time than sending gradients.

    Args:
        stated: The factors.
        weights: The weights.
        count: The number of processes.
        bfloat16: Whether gradients are sent in bfloat16.
    """
    if stated.most_tokens is not None and count * stated.tokens > stated.most_tokens:
        return False
    values = sum([each.numel() * (2 if bfloat16 else each.element_size()) for each in weights])
    # A process receives n - 1 parts in an all-gather, and in an all-reduce 2 (n - 1) / n of the gradients.
    factors = (count - 1) * (stated.nbytes + stated.flops / _FLOPS_OF_A_BYTE)
    return factors < 2 * (count - 1) / count * values


def number_of(chosen: Sequence[Candidate], weights: Sequence[torch.Tensor]) -> int:
    """Return a number that is equal for the same factors of the same weights; 0 for none.

    Args:
        chosen: The nodes.
        weights: All weights, in the same order in all processes.
    """
    if not chosen:
        return 0
    places = {weight: place for place, weight in enumerate(weights)}
    told = [(str(each.stated), [places[weight] for weight in each.weights]) for each in chosen]
    return 1 + int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=7).digest())

"""Which gradients are exchanged as factors, and their exchange, after which each process computes the means itself."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from gatewise.contract.token_factors import FactorReceiver, TokenFactors
from gatewise.training.processes import Finish, Processes

_FLOPS_OF_A_BYTE = 3000
"""The floating-point operations of a 16-bit matrix product in the time in which NCCL reduces a byte.

Between two H200s, an all-reduce of 36 MB takes 148 us, and products of 6016 x 1504 values with 700 more tokens take 15
us longer (`benchmarks/results/collectives.jsonl` and `product_times.jsonl`): 840 TFLOP/s, and 0.24 TB/s.
"""

_MOST_OF_GRADIENTS = 0.6
"""The largest cost of factors, in bytes, as a share of the bytes of the gradients.

Gradients are sent while the backward pass goes on, and products cannot be hidden, so that a smaller cost is not always
a gain. On two H200s, a step took 0.89 of the time at a share of 0.26, 0.96 at 0.42, 0.99 at 0.53, and 1.02 at 0.94
(`benchmarks/results/factor_exchange.jsonl`).
"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidate:
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
            self._sent = self._processes.start_all_gather_into(self._receiver.rooms, self._receiver.parts)

    def finish(self) -> None:
        """Wait for the factors of all processes, and give each weight the mean of the gradients."""
        assert self._sent is not None  # or else the memory for the factors of others has no values
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


def chosen(found: Iterable[Candidate], count: int, *, bfloat16: bool, least_bytes: int) -> list[Candidate]:
    """Return the nodes whose factors are sent, which is estimated to take less time than sending their gradients.

    Args:
        found: The nodes.
        count: The number of processes.
        bfloat16: Whether gradients are sent in bfloat16.
        least_bytes: The size from which on a gradient is sent by itself; smaller ones are sent together in any case.
    """
    fit = [
        each
        for each in found
        # Of 16-bit factors, only bfloat16 has the range of the gradients.
        if torch.float16 not in each.stated.dtypes
        and all(weight.nbytes >= least_bytes for weight in each.weights if weight.dim() > 1)
        and (each.stated.most_tokens is None or count * each.stated.tokens <= each.stated.most_tokens)
    ]
    taken: list[Candidate] = []
    for each in sorted(fit, key=lambda each: share([each], count, bfloat16=bfloat16)):
        alone, together = (share(group, count, bfloat16=bfloat16) for group in ([each], [*taken, each]))
        if alone >= 1 or together > _MOST_OF_GRADIENTS:
            break
        taken.append(each)
    return [each for each in fit if each in taken]  # in an order in which gradients are computed


def share(found: Sequence[Candidate], count: int, *, bfloat16: bool) -> float:
    """Return the cost of factors, in bytes, as a share of the bytes of their gradients.

    Args:
        found: The nodes, at least one.
        count: The number of processes.
        bfloat16: Whether gradients are sent in bfloat16.
    """
    cost = sum([_cost(each.stated, count) for each in found])
    return cost / sum([_sent(each.weights, count, bfloat16=bfloat16) for each in found])


def _cost(stated: TokenFactors, count: int) -> float:
    """Return the bytes that a process receives in an all-gather of factors, and those in the time of the products."""
    return (count - 1) * (stated.nbytes + stated.flops / _FLOPS_OF_A_BYTE)


def _sent(weights: Sequence[torch.Tensor], count: int, *, bfloat16: bool) -> float:
    """Return the bytes that a process receives in an all-reduce of gradients."""
    values = sum([each.numel() * (2 if bfloat16 else each.element_size()) for each in weights])
    return 2 * (count - 1) / count * values


def number_of(found: Sequence[Candidate], weights: Sequence[torch.Tensor], kind: str) -> int:
    """Return a number that is equal for the same factors of the same weights on devices of one kind; 0 for none.

    Args:
        found: The nodes.
        weights: All weights, in the same order in all processes.
        kind: The name of the device: libraries compute products in one way on equal devices.
    """
    if not found:
        return 0
    places = {weight: place for place, weight in enumerate(weights)}
    told = [(str(each.stated), [places[weight] for weight in each.weights]) for each in found]
    return 1 + int.from_bytes(hashlib.blake2b(repr((kind, told)).encode(), digest_size=7).digest())

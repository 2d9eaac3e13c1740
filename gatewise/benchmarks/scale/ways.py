"""The ways to train a model on several processes, which are the rows of the benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import nn


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A way to train on several processes, which is one row of the benchmark for each batch.

    Attributes:
        name: The name in tables.
        plain: A function that creates what a loop in plain PyTorch trains: the LSTM of a language model from (size,
            num_layers, dropout), or a translation model from its case; None for the step of the training command.
        parallel: Whether gradients are averaged by `DistributedDataParallel`; otherwise by gatewise.
        static: Whether it is told that the graph is static and gradients are views of its buckets.
        bfloat16: Whether gradients are sent in bfloat16.
        rows: Whether only those rows of the gradients of embeddings are sent that occur in the batches.
        factors: Whether the factors of gradients are sent where that is faster, as by the training commands.
        overlapped: Whether the calls of a loop in plain PyTorch are in `gatewise.for_data_parallel`, as those of
            the training commands are.
        sharded: Whether weights, gradients and the optimizer are divided among the processes by `fully_shard`, in place
            of `DistributedDataParallel`.
    """

    name: str
    plain: Callable[..., nn.Module] | None = None
    parallel: bool = False
    static: bool = False
    bfloat16: bool = False
    rows: bool = False
    factors: bool = True
    overlapped: bool = False
    sharded: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Ways:
    """The ways to train one model.

    Attributes:
        default: The ways that are measured by default, the yardstick first.
        others: The ways that are measured if they are named.
    """

    default: tuple[Way, ...]
    others: tuple[Way, ...]

    @property
    def yardstick(self) -> Way:
        """The way with whose losses the others are compared."""
        return self.default[0]

    @property
    def names(self) -> list[str]:
        """The names of all ways."""
        return [way.name for way in (*self.default, *self.others)]

    def named(self, names: Sequence[str]) -> tuple[Way, ...]:
        """Return the ways with these names, or those that are measured by default.

        Raises:
            KeyError: There is no way of a name.
        """
        known = {way.name: way for way in (*self.default, *self.others)}
        return tuple(known[name] for name in dict.fromkeys(names)) or self.default

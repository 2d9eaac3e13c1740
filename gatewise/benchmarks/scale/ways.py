"""The ways to train a language model on several processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from gatewise.benchmarks.rivals import torch_lstm
from gatewise.nn import LSTM


def _gatewise_lstm(size: int, num_layers: int, dropout: float) -> nn.Module:
    return LSTM(size, size, num_layers, dropout=dropout)


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A way to train on several processes, which is one row of the benchmark for each batch.

    Attributes:
        name: The name in tables.
        layer: A function that creates the LSTM of a loop in plain PyTorch from (size, num_layers, dropout); None for
            the step of `gatewise train lm`.
        parallel: Whether gradients are averaged by `DistributedDataParallel`; otherwise by gatewise.
        static: Whether it is told that the graph is static and gradients are views of its buckets.
        bfloat16: Whether gradients are sent in bfloat16.
        rows: Whether only those rows of the gradient of the embedding are sent that occur in the batches.
        overlapped: Whether the calls of a loop in plain PyTorch are in `gatewise.for_data_parallel`, as those of
            `gatewise train lm` are.
        sharded: Whether weights, gradients and the optimizer are divided among the processes by `fully_shard`, in place
            of `DistributedDataParallel`.
    """

    name: str
    layer: Callable[[int, int, float], nn.Module] | None = None
    parallel: bool = False
    static: bool = False
    bfloat16: bool = False
    rows: bool = False
    overlapped: bool = False
    sharded: bool = False


WAYS = (
    Way("nn.LSTM, DDP", torch_lstm, parallel=True),
    Way("gatewise.LSTM, DDP", _gatewise_lstm, parallel=True),
    Way("gatewise train lm"),
)
"""The ways that are measured by default, the yardstick first."""

OTHERS = (
    Way("gatewise.LSTM, DDP, for_data_parallel", _gatewise_lstm, parallel=True, overlapped=True),
    Way("gatewise.LSTM, DDP static", _gatewise_lstm, parallel=True, static=True),
    Way("gatewise.LSTM, DDP static bfloat16", _gatewise_lstm, parallel=True, static=True, bfloat16=True),
    Way("train lm's step, DDP static", parallel=True, static=True),
    Way("gatewise train lm, rows", rows=True),
    Way("gatewise train lm, bfloat16", bfloat16=True),
    Way("gatewise train lm, rows, bfloat16", rows=True, bfloat16=True),
    Way("gatewise.LSTM, fully_shard", _gatewise_lstm, sharded=True),
)
"""The ways that are measured if they are named."""


def named(names: list[str]) -> tuple[Way, ...]:
    """Return the ways with these names, or those that are measured by default.

    Raises:
        KeyError: There is no way of a name.
    """
    known = {way.name: way for way in (*WAYS, *OTHERS)}
    return tuple(known[name] for name in dict.fromkeys(names)) or WAYS

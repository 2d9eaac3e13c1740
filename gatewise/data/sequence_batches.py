"""Batches of sequences of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import NamedTuple

import torch

from gatewise.contract.errors import ArgumentError, DataError, sentence
from gatewise.data.sequences import Sequences
from gatewise.data.stream import check_rank

_POOL = 32
"""The number of batches whose sequences are drawn together and then sorted by length."""


class EqualBatch(NamedTuple):
    """A batch of sequences of the same length.

    Attributes:
        inputs: The features, float32 [T, B, F].
        targets: The targets, int64 classes or float32 numbers, [B].
        rows: The indices of the sequences, int64 [B].
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor

    @property
    def lengths(self) -> None:
        """None, because all sequences have T steps."""

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - not a tuple's count of equal items
        """The number of sequences, B."""
        return self.inputs.shape[1]


class RaggedBatch(NamedTuple):
    """A batch of sequences of unequal length, padded with zeros.

    Attributes:
        inputs: The features, float32 [T, B, F]; T is the length of the longest sequence.
        lengths: The length of each sequence in steps, int64 [B].
        targets: The targets, int64 classes or float32 numbers, [B].
        rows: The indices of the sequences, int64 [B].
    """

    inputs: torch.Tensor
    lengths: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride] - not a tuple's count of equal items
        """The number of sequences, B."""
        return self.inputs.shape[1]


class SequenceBatches:
    """Iterates over batches of sequences, which are stored on the device.

    A batch has sequences of similar length, so that there is little padding: shuffled sequences are sorted by length
    within pools of several batches, and the batches are shuffled again. The order depends only on the seed and the
    epoch.

    Args:
        sequences: The sequences.
        targets: The target of each sequence, int64 or float32 [N].
        batch_size: The number of sequences in a batch over all processes.
        device: The device of the batches.
        rank: The rank of this process.
        processes: The number of processes that share each batch; a training batch is divided equally.
        shuffle: Whether to shuffle each epoch, as for training. Up to `processes - 1` sequences may then be left out at
            the end of an epoch.
        seed: The seed of the shuffling.

    Raises:
        ArgumentError: `batch_size` is no positive integer or, with `shuffle`, not a multiple of `processes`; there is
            not one target for each sequence, or no process of this rank.
        DataError: With `shuffle`, there are fewer sequences than processes.
    """

    def __init__(
        self,
        sequences: Sequences,
        targets: torch.Tensor,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        rank: int = 0,
        processes: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if not isinstance(batch_size, Integral) or batch_size < 1:
            raise ArgumentError(sentence("batch_size", "a positive integer", repr(batch_size)))
        check_rank(rank, processes)
        if targets.shape != (len(sequences),):
            expectation = f"one for each of the {len(sequences)} sequences, [{len(sequences)}]"
            raise ArgumentError(sentence("targets", expectation, list(targets.shape)))
        if shuffle and batch_size % processes:
            expectation = f"a multiple of the {processes} processes"
            advice = "Every process takes equally many sequences."
            raise ArgumentError(sentence("batch_size", expectation, batch_size, advice))
        if shuffle and len(sequences) < processes:
            raise DataError(
                f"{sequences.name} has {len(sequences)} sequences for {processes} processes. Start fewer processes."
            )
        self._lengths = sequences.lengths
        self._ragged = bool((self._lengths != self._lengths[0]).any())
        self._values = sequences.values.to(device)
        self._offsets = (self._lengths.cumsum(0) - self._lengths).to(device)
        self._lengths_there = self._lengths.to(device)
        self._targets = targets.to(device)
        self._batch_size = batch_size
        self._rank = rank
        self._processes = processes
        self._shuffle = shuffle
        self._seed = seed

    @property
    def ragged(self) -> bool:
        """Whether the lengths differ."""
        return self._ragged

    @property
    def longest(self) -> int:
        """The length of the longest sequence in steps."""
        return int(self._lengths.max())

    def __len__(self) -> int:
        return -(-self._read() // self._batch_size)

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[EqualBatch | RaggedBatch]:
        """Iterate over the batches of one epoch.

        Args:
            epoch: The number of the epoch, from 0; it matters only with `shuffle`.
            start: The number of batches to skip, to resume an interrupted epoch.

        Yields:
            This process's part of each batch. A last small batch in which this process has no sequence is skipped.
        """
        order = self._shuffled(epoch) if self._shuffle else self._sorted(torch.arange(len(self._lengths)))
        for rows in order.split(self._batch_size)[start:]:
            own = rows[self._rank :: self._processes]
            if len(own):
                yield self._batch(own)

    def _read(self) -> int:
        """Return the number of sequences in an epoch over all processes."""
        count = len(self._lengths)
        return count - count % self._processes if self._shuffle else count

    def _shuffled(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        drawn = torch.randperm(len(self._lengths), generator=generator)[: self._read()]
        if not self._ragged:
            return drawn
        full = len(drawn) - len(drawn) % self._batch_size
        pools = [self._sorted(pool) for pool in drawn[:full].split(_POOL * self._batch_size)]
        batches = torch.cat(pools).view(-1, self._batch_size) if pools else drawn[:0].view(0, self._batch_size)
        batches = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([batches.flatten(), drawn[full:]])

    def _sorted(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self._lengths[rows].argsort(stable=True)] if self._ragged else rows

    def _batch(self, rows: torch.Tensor) -> EqualBatch | RaggedBatch:
        longest = int(self._lengths[rows].max())
        rows = rows.to(self._values.device)
        lengths = self._lengths_there[rows]
        step = torch.arange(longest, device=rows.device)[:, None]
        inputs = self._values[self._offsets[rows] + torch.minimum(step, lengths - 1)]
        if not self._ragged:
            return EqualBatch(inputs, self._targets[rows], rows)
        inputs.masked_fill_((step >= lengths)[:, :, None], 0.0)
        return RaggedBatch(inputs, lengths, self._targets[rows], rows)

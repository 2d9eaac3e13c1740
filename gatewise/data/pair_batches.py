"""Batches of sentence pairs of similar length, in few shapes, as many pairs as fit into a number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gatewise.contract.errors import ArgumentError, DataError, sentence
from gatewise.data.sentences import BEGINNING, END, PADDING

_FINENESS = 3
"""Lengths between two powers of two fall into 2^3 buckets, so that at most an eighth of the longer side is padding."""

_ALIGNED, _MANY = 8, 64
"""From 64 pairs on, those that a process reads at a time are a multiple of 8, which matrix kernels are made for."""


class _Tensors(NamedTuple):
    source: torch.Tensor
    source_lengths: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor
    token_weight: torch.Tensor
    rows: torch.Tensor


class PairBatch(_Tensors):
    """Sentences and their translations, with `PADDING` behind the end.

    Attributes:
        source: int64 [S, B].
        source_lengths: Tokens of each sentence, int64 [B].
        inputs: What the decoder reads: `BEGINNING`, then the translation; int64 [T, B].
        targets: What it should answer: the translation, then `END`; int64 [T, B].
        token_weight: What a target token counts in the loss, 1 / `count`: float32 [].
        rows: Which pairs they are, int64 [B].
        count: Target tokens, the ends included: the mean over the processes that share the batch.
    """

    count: float  # pyright: ignore[reportIncompatibleMethodOverride] - not a tuple's count of equal items

    def __new__(cls, *tensors: torch.Tensor, count: float = 0) -> PairBatch:
        """Hold the tensors; a batch made of tensors alone, as a recording makes it, has no count."""
        batch = super().__new__(cls, *tensors)
        batch.count = count
        return batch


class PairBatches:
    """Epochs over sentence pairs that lie on the device from the start.

    Pairs are put in buckets by the longer of their two lengths, each bucket is shuffled and cut into batches, and the
    batches are shuffled: little is padding, every epoch has as many batches, and the same epoch always yields the
    same. What is left over in a bucket goes with the next longer pairs.

    All batches of a bucket have one shape: both sides are padded to the longest that the bucket is for. An epoch has as
    many shapes as buckets, and one more for the batch at its end, so that whatever is prepared for a shape, such as a
    CUDA graph of the training step, is prepared a few dozen times and serves nearly every batch.

    Args:
        source: Tokens of the sentences, each int64 [N], without beginning and end.
        target: Tokens of their translations.
        batch_tokens: Most tokens in a batch over all processes, padding included, on the side that has more.
        device: Where the batches will be read.
        rank: Which process this is.
        processes: How many processes share each batch; a training batch has as many pairs for each.
        shuffle: Whether each epoch has another order, as training needs it. Then fewer pairs than processes may be left
            out at the end of an epoch.
        seed: Seed of the orders.
        name: What the pairs are, for errors.

    Raises:
        ArgumentError: `batch_tokens` is not positive.
        DataError: There is no pair, or a pair is too long for any batch; the message has its line and length.
    """

    def __init__(
        self,
        source: Sequence[torch.Tensor],
        target: Sequence[torch.Tensor],
        batch_tokens: int,
        *,
        device: torch.device | str = "cpu",
        rank: int = 0,
        processes: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        name: str = "the parallel text",
    ) -> None:
        if batch_tokens < 1:
            raise ArgumentError(sentence("batch_tokens", "a positive number of tokens", batch_tokens))
        if len(source) < (processes if shuffle else 1):
            raise DataError(f"{name} has {len(source)} pairs for {processes} processes. Give more pairs.")
        self._source, self._target = _Side(source, device), _Side(target, device)
        lengths = torch.maximum(self._source.lengths, self._target.lengths + 1)
        fits = batch_tokens // processes if shuffle else batch_tokens
        if int(lengths.max()) > fits:
            row = int(lengths.argmax())
            between = f" for each of {processes} processes" if shuffle and processes > 1 else ""
            raise DataError(
                f"pair {row + 1:,} of {name} is too long for any batch: its longer side has {int(lengths[row]):,} "
                f"tokens, `batch_tokens` leaves room for {fits:,}{between}. Raise `batch_tokens`, or leave such pairs "
                "out."
            )
        self._device = torch.device(device)
        self._batch_tokens = batch_tokens
        self._rank, self._processes = rank, processes
        self._shuffle, self._seed = shuffle, seed
        self._buckets = _rounded_up(lengths).clamp(max=fits)
        shapes = [(len(rows), steps) for rows, steps in self._batches(torch.arange(len(lengths)))]
        self._count = len(shapes)
        # What is left out at the end of an epoch differs from epoch to epoch: the shares are those of this order.
        self._places = 2 * sum(rows * steps for rows, steps in shapes)
        self._shapes = len(set(shapes))

    @property
    def longest_source(self) -> int:
        """Tokens of the longest sentence."""
        return int(self._source.lengths.max())

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of all sentences, and of all translations without their ends."""
        return int(self._source.lengths.sum()), int(self._target.lengths.sum())

    @property
    def shapes(self) -> int:
        """How many different shapes the batches of an epoch have."""
        return self._shapes

    def largest(self, batch_tokens: int | None = None) -> list[tuple[int, int]]:
        """Return the largest batch of each length that this process may be given: its padded length and its pairs.

        Args:
            batch_tokens: Instead of that of these batches, to see what another would do.
        """
        found, before = [], 0
        for steps, rows in zip(*self._by_bucket(self._buckets.argsort()), strict=True):
            before += len(rows)  # what is left over of shorter pairs comes with these
            found.append((steps, -(-min(self._size(steps, batch_tokens), before) // self._processes)))
        return found

    @property
    def padding(self) -> float:
        """Share of an epoch's places that hold padding; beginning and end of a translation are one token."""
        return 1 - (sum(self.tokens) + len(self._buckets)) / self._places

    def __len__(self) -> int:
        return self._count

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[PairBatch]:
        """Read the batches of one epoch.

        Args:
            epoch: Which epoch, from 0; matters only with `shuffle`.
            start: How many batches to skip, to go on where an interrupted epoch stopped.

        Yields:
            This process's share of each batch; without `shuffle`, a process whose share is empty gets none of it.
        """
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        rows = torch.arange(len(self._buckets))
        if self._shuffle:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        batches = list(self._batches(rows))
        if self._shuffle:
            batches = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        for batch, steps in batches[start:]:
            own = batch[self._rank :: self._processes]
            if len(own):
                yield self._batch(own, batch, steps)

    def _batches(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        """Cut rows into batches, bucket by bucket, in their order within a bucket; yield each and its padded length."""
        rows = rows[self._buckets[rows].argsort(stable=True)]
        left_over, steps = rows[:0], 0
        for steps, own in zip(*self._by_bucket(rows), strict=True):
            size = self._size(steps)
            waiting = torch.cat([left_over, own])
            full = len(waiting) - len(waiting) % size
            for batch in waiting[:full].split(size) if full else ():
                yield batch, steps
            left_over = waiting[full:]
        if self._shuffle:
            left_over = left_over[: len(left_over) - len(left_over) % self._processes]
        if len(left_over):
            yield left_over, steps

    def _size(self, steps: int, batch_tokens: int | None = None) -> int:
        """Return how many pairs are in a batch of pairs of this length."""
        size = max(1, (batch_tokens or self._batch_tokens) // steps)
        if not self._shuffle:
            return size
        own = max(1, size // self._processes)
        if own >= _MANY:
            own -= own % _ALIGNED
        return own * self._processes

    def _by_bucket(self, rows: torch.Tensor) -> tuple[list[int], tuple[torch.Tensor, ...]]:
        buckets, counts = self._buckets[rows].unique_consecutive(return_counts=True)
        return buckets.tolist(), rows.split(counts.tolist())

    def _batch(self, rows: torch.Tensor, whole: torch.Tensor, steps: int) -> PairBatch:
        if self._shuffle:
            count = int((self._target.lengths[whole] + 1).sum()) / self._processes
        else:
            count = int((self._target.lengths[rows] + 1).sum())
        there = rows.to(self._device)
        source, source_lengths = self._source.padded(there, steps)
        targets, target_lengths = self._target.padded(there, steps)
        inputs = torch.cat([targets.new_full((1, len(rows)), BEGINNING), targets[:-1]])
        targets.scatter_(0, target_lengths[None], END)
        weight = torch.full((), 1 / count, device=self._device)
        return PairBatch(source, source_lengths, inputs, targets, weight, there, count=count)


class _Side:
    """One side of the pairs: all its tokens in a row."""

    def __init__(self, sentences: Sequence[torch.Tensor], device: torch.device | str) -> None:
        self.lengths = torch.tensor([len(each) for each in sentences], dtype=torch.int64)
        values = torch.cat([*sentences, torch.tensor([PADDING])])  # so that an empty last sentence has a place
        self._values = values.to(device)
        self._offsets = (self.lengths.cumsum(0) - self.lengths).to(device)
        self._lengths_there = self.lengths.to(device)

    def padded(self, rows: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of rows that are on the device, [steps, B], and their lengths [B]."""
        lengths = self._lengths_there[rows]
        step = torch.arange(steps, device=rows.device)[:, None]
        places = self._offsets[rows] + torch.minimum(step, (lengths - 1).clamp(min=0))
        return self._values[places].masked_fill(step >= lengths, PADDING), lengths


def _rounded_up(lengths: torch.Tensor) -> torch.Tensor:
    """Return the longest length of each one's bucket."""
    powers = torch.frexp(lengths.float()).exponent.to(torch.int64)  # 2^(power - 1) <= length < 2^power
    width = 1 << (powers - 1 - _FINENESS).clamp(min=0)
    return -(-lengths // width) * width

"""Batches of sentence pairs of similar length, padded to a few shapes and limited by a number of tokens."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import NamedTuple

import torch

from gatewise.contract.errors import ArgumentError, DataError, sentence
from gatewise.data.sentences import BEGINNING, END, PADDING
from gatewise.data.stream import check_rank

_FINENESS = 3
"""There are 2^3 buckets of lengths between two powers of two, so that at most 1/8 of the longer side is padding."""

_ALIGNED, _MANY = 8, 64
"""From 64 pairs per process on, their number is a multiple of 8, for which matrix kernels are efficient."""

_TOGETHER = 1 << 16
"""The number of positions in batches that are made and copied to the device at once."""


class _Tensors(NamedTuple):
    source: torch.Tensor
    source_lengths: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor
    token_weight: torch.Tensor
    rows: torch.Tensor


class PairBatch(_Tensors):
    """A batch of sentences and their translations, padded with `PADDING`.

    Attributes:
        source: The source tokens, int64 [S, B].
        source_lengths: The number of tokens of each source sentence, int64 [B].
        inputs: The decoder inputs, `BEGINNING` followed by the translation; int64 [T, B].
        targets: The decoder targets, the translation followed by `END`; int64 [T, B].
        token_weight: The weight of a target token in the loss, 1 / `count`; float32 [].
        rows: The indices of the pairs, int64 [B].
        count: The number of target tokens including `END`, averaged over the processes that share the batch.
    """

    count: float  # pyright: ignore[reportIncompatibleMethodOverride] - not a tuple's count of equal items

    def __new__(cls, *tensors: torch.Tensor, count: float = 0) -> PairBatch:
        """Create a batch; one that is made of tensors alone, as CUDA graph capture does, has no count."""
        batch = super().__new__(cls, *tensors)
        batch.count = count
        return batch


class PairBatches:
    """Iterates over batches of sentence pairs, which are padded on the CPU and copied to the device.

    Pairs are put in buckets by the longer of their two lengths, each bucket is shuffled and split into batches, and the
    batches are shuffled. There is little padding, every epoch has the same number of batches, and the order depends
    only on the seed and the epoch. The pairs that do not fill a batch of their bucket move to the next longer bucket.

    All batches of a bucket have one shape: both sides are padded to the longest length of the bucket. An epoch has as
    many shapes as buckets, and one more for its last batch, so that work that depends on the shape, such as CUDA graph
    capture of the training step, is done a few dozen times and serves nearly every batch.

    Args:
        source: The tokens of each source sentence, int64 [N], without beginning and end.
        target: The tokens of each translation.
        batch_tokens: The maximum number of tokens in a batch over all processes, padding included, on the longer side.
        device: The device of the batches.
        rank: The rank of this process.
        processes: The number of processes that share each batch; in training, all get the same number of pairs.
        shuffle: Whether to shuffle each epoch, as for training. Up to `processes - 1` pairs may then be left out at the
            end of an epoch.
        seed: The seed of the shuffling.
        name: The name of the data in error messages.

    Raises:
        ArgumentError: `batch_tokens` is no positive integer, the numbers of sentences differ, or there is no process of
            this rank.
        DataError: There is no pair, or a pair is too long for any batch; the message has its index and length.
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
        if not isinstance(batch_tokens, Integral) or batch_tokens < 1:
            raise ArgumentError(sentence("batch_tokens", "a positive number of tokens", repr(batch_tokens)))
        check_rank(rank, processes)
        if len(source) != len(target):
            advice = "Sentence n of `source` belongs to sentence n of `target`."
            raise ArgumentError(
                sentence("target", f"as many sentences as `source`, {len(source)}", len(target), advice)
            )
        if len(source) < (processes if shuffle else 1):
            raise DataError(f"{name} has {len(source)} pairs for {processes} processes. Give more pairs.")
        self._source, self._target = _Side(source), _Side(target)
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
        # Shuffling changes which pairs an epoch leaves out; the statistics are those of the unshuffled order.
        self._places = 2 * sum(rows * steps for rows, steps in shapes)
        counts = collections.Counter(shapes)
        self._shapes = [(steps, rows) for (rows, steps), _ in counts.most_common()]

    @property
    def longest_source(self) -> int:
        """The number of tokens of the longest source sentence."""
        return int(self._source.lengths.max())

    @property
    def tokens(self) -> tuple[int, int]:
        """The number of tokens of all sentences and of all translations, without `END`."""
        return int(self._source.lengths.sum()), int(self._target.lengths.sum())

    @property
    def bytes_on_device(self) -> int:
        """The most bytes of batches on the device: those of a copy, and of the one before, which may be in use."""
        positions = max([_TOGETHER, *[steps * rows for steps, rows in self._shapes]])
        # Source tokens, inputs and targets have as many positions; lengths and indices are few.
        return 2 * 3 * positions * torch.int64.itemsize

    @property
    def shapes(self) -> int:
        """The number of different shapes among the batches of an epoch."""
        return len(self._shapes)

    def shapes_by_count(self) -> list[tuple[int, int]]:
        """Return the shapes of the batches of an epoch, the most frequent first, as (padded length, pairs).

        The pairs are those of this process, of which another process may have one less in the last batch.
        """
        return [(steps, -(-rows // self._processes)) for steps, rows in self._shapes]

    def largest(self, batch_tokens: int | None = None) -> list[tuple[int, int]]:
        """Return the largest batch of each padded length that this process may get, as (padded length, pairs).

        Args:
            batch_tokens: The limit to assume in place of that of these batches.
        """
        found, before = [], 0
        for steps, rows in zip(*self._by_bucket(self._buckets.argsort()), strict=True):
            before += len(rows)  # pairs that fill no batch of a shorter bucket are batched with these
            found.append((steps, -(-min(self._size(steps, batch_tokens), before) // self._processes)))
        return found

    @property
    def padding(self) -> float:
        """The fraction of an epoch's positions that hold padding; `BEGINNING` and `END` count as one token together."""
        return 1 - (sum(self.tokens) + len(self._buckets)) / self._places

    def __len__(self) -> int:
        return self._count

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[PairBatch]:
        """Iterate over the batches of one epoch.

        Args:
            epoch: The number of the epoch, from 0; it matters only with `shuffle`.
            start: The number of batches to skip, to resume an interrupted epoch.

        Yields:
            This process's part of each batch. Without `shuffle`, a batch in which this process has no pair is skipped.
        """
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        rows = torch.arange(len(self._buckets))
        if self._shuffle:
            rows = rows[torch.randperm(len(rows), generator=generator)]
        batches = list(self._batches(rows))
        if self._shuffle:
            batches = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        parts = [(batch[self._rank :: self._processes], batch, steps) for batch, steps in batches[start:]]
        parts = [(own, whole, steps) for own, whole, steps in parts if len(own)]
        counts = [self._count_of(own, whole) for own, whole, _ in parts]
        weights = torch.tensor([1 / count for count in counts], dtype=torch.float32).to(self._device)
        planned = [
            _Planned(own, weight, count, steps)
            for (own, _, steps), weight, count in zip(parts, weights, counts, strict=True)
        ]
        for some in _together(planned):
            yield from self._made(some)

    def _batches(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        """Split rows into batches, bucket by bucket in the given order; yield each batch and its padded length."""
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
        """Return the number of pairs in a batch of this padded length."""
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

    def _count_of(self, own: torch.Tensor, whole: torch.Tensor) -> float:
        """Return the number of target tokens of this process's part of a batch; in training, the mean of the parts'."""
        if self._shuffle:
            return int((self._target.lengths[whole] + 1).sum()) / self._processes
        return int((self._target.lengths[own] + 1).sum())

    def _made(self, planned: Sequence[_Planned]) -> Iterator[PairBatch]:
        """Yield some batches in their order; those of one shape are made at once."""
        alike: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        for place, each in enumerate(planned):
            alike[len(each.rows), each.steps].append(place)
        sides: dict[int, tuple[torch.Tensor, ...]] = {}
        for (_, steps), places in alike.items():
            rows = torch.stack([planned[place].rows for place in places])
            source, source_lengths = self._source.padded(rows, steps)
            targets, target_lengths = self._target.padded(rows, steps)
            inputs = torch.cat([torch.full_like(targets[:, :1], BEGINNING), targets[:, :-1]], 1)
            targets.scatter_(1, target_lengths[:, None], END)
            sides |= zip(places, zip(source, source_lengths, inputs, targets, rows, strict=True), strict=True)
        parts = [part for place in range(len(planned)) for part in sides[place]]
        there = iter(_copied(parts, self._device))
        for each in planned:
            source, source_lengths, inputs, targets, rows = (next(there) for _ in range(5))
            yield PairBatch(source, source_lengths, inputs, targets, each.weight, rows, count=each.tokens)


class _Planned(NamedTuple):
    """A batch to be made: the rows of its pairs, its weight of a token, its number of tokens, and its padded length."""

    rows: torch.Tensor
    weight: torch.Tensor
    tokens: float
    steps: int


def _together(planned: Sequence[_Planned]) -> Iterator[Sequence[_Planned]]:
    """Divide batches into runs of at most `_TOGETHER` positions, or one batch."""
    first = positions = 0
    for place, each in enumerate(planned):
        own = len(each.rows) * each.steps
        if positions + own > _TOGETHER and place > first:
            yield planned[first:place]
            first, positions = place, 0
        positions += own
    if planned:
        yield planned[first:]


def _copied(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy int64 tensors to a device at once.

    Every copy from the host takes as long as several operations. The copies begin at addresses that are multiples of
    16, as separate tensors do: kernels depend on that.
    """
    sizes = [part.numel() + part.numel() % 2 for part in parts]
    # From page-locked memory, a copy need not wait for the work that the device has been given before.
    together = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    for own, part in zip(together.split(sizes), parts, strict=True):
        own[: part.numel()] = part.flatten()
    there = together.to(device, non_blocking=True).split(sizes)
    return [own[: part.numel()].view(part.shape) for own, part in zip(there, parts, strict=True)]


class _Side:
    """One side of the pairs: the tokens of all sentences, concatenated."""

    def __init__(self, sentences: Sequence[torch.Tensor]) -> None:
        self.lengths = torch.tensor([each.numel() for each in sentences], dtype=torch.int64)
        values = torch.cat([*sentences, torch.tensor([PADDING])])  # keeps the offset of an empty last sentence valid
        self._values = values
        self._offsets = self.lengths.cumsum(0) - self.lengths

    def padded(self, rows: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of the sentences of some batches, [N, steps, B], and their lengths, [N, B].

        Args:
            rows: The indices of the sentences [N, B].
            steps: The padded length.
        """
        lengths = self.lengths[rows]
        step = torch.arange(steps)[:, None]
        places = self._offsets[rows][:, None] + torch.minimum(step, (lengths - 1).clamp(min=0)[:, None])
        values = self._values.index_select(0, places.flatten()).view(places.shape)
        return values.masked_fill_(step >= lengths[:, None], PADDING), lengths


def _rounded_up(lengths: torch.Tensor) -> torch.Tensor:
    """Return the padded length of the bucket of each length."""
    powers = torch.frexp(lengths.float()).exponent.to(torch.int64)  # 2^(power - 1) <= length < 2^power
    width = 1 << (powers - 1 - _FINENESS).clamp(min=0)
    return -(-lengths // width) * width

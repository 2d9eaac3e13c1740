"""The filter that leaves unsuitable sentence pairs out of the training data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from gatewise.contract.errors import ArgumentError, sentence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairFilter:
    """The conditions on a training pair.

    Attributes:
        longest: The maximum number of tokens of a sentence or its translation.
        ratio: The maximum ratio of the two numbers of tokens, the larger to the smaller; 0 allows any ratio.
    """

    longest: int = 100
    ratio: float = 9.0

    def __post_init__(self) -> None:
        """Reject conditions that no pair could meet."""
        if self.longest < 1:
            raise ArgumentError(sentence("longest", "a positive number of tokens", self.longest))
        if self.ratio != 0 and self.ratio < 1:
            raise ArgumentError(sentence("ratio", "at least 1, or 0 for any", self.ratio))


@dataclasses.dataclass(frozen=True, slots=True)
class FilterReport:
    """The number of pairs that were left out, each counted under the first reason that applies.

    Attributes:
        pairs: The number of pairs before filtering.
        empty: The number of pairs in which one side has no tokens.
        too_long: The number of pairs in which one side has more than `PairFilter.longest` tokens.
        uneven: The number of pairs in which one side has more than `PairFilter.ratio` times as many tokens as the
            other.
    """

    pairs: int
    empty: int
    too_long: int
    uneven: int

    @property
    def kept(self) -> int:
        """The number of pairs that are kept."""
        return self.pairs - self.empty - self.too_long - self.uneven

    def __str__(self) -> str:
        """Return a summary of one line."""
        reasons = {"empty": self.empty, "too long": self.too_long, "of uneven length": self.uneven}
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
        return f"{self.kept:,} of {self.pairs:,} kept" + (f"; left out: {left_out}" if left_out else "")


def filter_pairs(
    source: Sequence[torch.Tensor], target: Sequence[torch.Tensor], rule: PairFilter
) -> tuple[list[int], FilterReport]:
    """Return the indices of the pairs to keep, in order, and a report of the others.

    Args:
        source: The tokens of each source sentence, int64 [N].
        target: The tokens of each translation.
        rule: The conditions on a pair.
    """
    kept: list[int] = []
    empty = too_long = uneven = 0
    for row, (one, other) in enumerate(zip(source, target, strict=True)):
        shorter, longer = sorted((one.numel(), other.numel()))  # faster than `len`, for many sentences
        if not shorter:
            empty += 1
        elif longer > rule.longest:
            too_long += 1
        elif rule.ratio and longer > rule.ratio * shorter:
            uneven += 1
        else:
            kept.append(row)
    return kept, FilterReport(len(source), empty, too_long, uneven)

"""Parallel text: line n of one file is the translation of line n of the other."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path

from gatewise.contract.errors import ArgumentError, CorpusError, sentence
from gatewise.data.corpus import SHARES, read_text


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelText:
    """Sentences and their translations.

    Attributes:
        name: A short description of the text.
        source: The source sentences.
        target: The translations, one per source sentence.
    """

    name: str
    source: tuple[str, ...]
    target: tuple[str, ...]

    def __post_init__(self) -> None:
        """Reject texts with different numbers of sentences and translations."""
        if len(self.source) != len(self.target):
            raise CorpusError(
                f"{self.name} has {len(self.source):,} sentences and {len(self.target):,} translations. Line n of the "
                "one must be the translation of line n of the other: look for a line that is missing or broken in two."
            )

    def __len__(self) -> int:
        return len(self.source)

    def select(self, rows: Sequence[int], name: str | None = None) -> ParallelText:
        """Return some of the pairs, in the order of `rows`."""
        return ParallelText(
            self.name if name is None else name,
            tuple(self.source[row] for row in rows),
            tuple(self.target[row] for row in rows),
        )


def read_parallel(source: str | Path, target: str | Path) -> ParallelText:
    """Read two UTF-8 files with the same number of lines.

    Args:
        source: The path of the source sentences, one per line.
        target: The path of the translations, one per line.

    Returns:
        All pairs, including those with an empty line; each run of white space within a line becomes one space.

    Raises:
        CorpusError: A file is missing, empty or not UTF-8, or their numbers of lines differ; the message has both.
    """
    sides = lines_of(read_text(source)), lines_of(read_text(target))
    if len(sides[0]) != len(sides[1]):
        raise CorpusError(
            f"{source} has {len(sides[0]):,} lines and {target} has {len(sides[1]):,}. Line n of the one must be the "
            "translation of line n of the other: look for a line that is missing or broken in two."
        )
    return ParallelText(Path(source).name, *sides)


def lines_of(text: str) -> tuple[str, ...]:
    r"""Return the lines of a text with single spaces between words; only ``\n`` ends a line."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return tuple(" ".join(line.split()) for line in lines)


def divide_parallel(
    pairs: ParallelText, shares: Sequence[float] = SHARES, seed: int = 0
) -> tuple[ParallelText, ParallelText, ParallelText]:
    """Split pairs at random into training, validation and test pairs; no source sentence occurs in two parts.

    Args:
        pairs: The pairs to split.
        shares: The fractions of the distinct sentences for training, validation and test; they sum to 1.
        seed: The seed of the random split.

    Returns:
        The three parts, in the order of the shares.

    Raises:
        ArgumentError: The shares are not three positive numbers that sum to 1.
        CorpusError: There are too few different sentences for three parts.
    """
    if len(shares) != 3 or min(shares) <= 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise ArgumentError(
            sentence("shares", "three positive numbers that sum to 1", tuple(shares), f"The default is {SHARES}.")
        )
    sentences = list(dict.fromkeys(pairs.source))
    random.Random(seed).shuffle(sentences)
    first, second = (round(len(sentences) * share) for share in (shares[0], shares[0] + shares[1]))
    part = {each: (place >= first) + (place >= second) for place, each in enumerate(sentences)}
    rows: tuple[list[int], list[int], list[int]] = [], [], []
    for row, each in enumerate(pairs.source):
        rows[part[each]].append(row)
    if not all(rows):
        raise CorpusError(
            f"{pairs.name} has {len(sentences)} different sentences, too few to be divided into training, validation "
            "and test pairs. Give more, or files for each part."
        )
    train, valid, test = (pairs.select(each) for each in rows)
    return train, valid, test

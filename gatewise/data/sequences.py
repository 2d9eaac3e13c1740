"""Labelled sequences of unequal length, for classification and regression."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from gatewise.contract.errors import ArgumentError, DataError, sentence

SEQUENCE_SHARES = (0.8, 0.1, 0.1)
"""The fractions of the sequences that become training, validation and test sequences."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sequences:
    """N sequences of F features, concatenated.

    Attributes:
        name: The source of the sequences, for reports and error messages.
        features: The names of the features.
        values: The steps of all sequences, float32 [sum of lengths, F].
        lengths: The length of each sequence in steps, at least 1, int64 [N] on the CPU.
        labels: The target of each sequence: strings, or float64 numbers, [N]; None when there are no labels.
        ids: The identifier of each sequence, strings [N].
        rows: The row of the file at which each sequence begins, for error messages, int64 [N]; None when the file has
            no rows.
    """

    name: str
    features: tuple[str, ...]
    values: torch.Tensor
    lengths: torch.Tensor
    labels: np.ndarray | None
    ids: np.ndarray
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def selected(self, chosen: torch.Tensor) -> Sequences:
        """Return the sequences at these indices, int64 [M], in the given order."""
        offsets = self.lengths.cumsum(0) - self.lengths
        lengths = self.lengths[chosen]
        starts = torch.repeat_interleave(offsets[chosen] - (lengths.cumsum(0) - lengths), lengths)
        numbers = chosen.numpy()
        return dataclasses.replace(
            self,
            values=self.values[starts + torch.arange(len(starts))],
            lengths=lengths,
            labels=None if self.labels is None else self.labels[numbers],
            ids=self.ids[numbers],
            rows=None if self.rows is None else self.rows[numbers],
        )

    def place(self, number: int) -> str:
        """Return the location of a sequence for an error message: its file, and its row or index."""
        where = f"sequence {number}" if self.rows is None else f"row {self.rows[number]}"
        return f"{self.name}, {where}"


def divide_sequences(
    sequences: Sequences, shares: Sequence[float] = SEQUENCE_SHARES, seed: int = 0
) -> tuple[Sequences, Sequences, Sequences]:
    """Split sequences at random into training, validation and test sequences.

    Args:
        sequences: The sequences to split, in any order.
        shares: The fractions for training, validation and test; they sum to 1.
        seed: The seed of the random split.

    Returns:
        The three parts, each with at least one sequence.

    Raises:
        ArgumentError: The shares are not three positive numbers that sum to 1.
        DataError: There are too few sequences for three parts.
    """
    if len(shares) != 3 or min(shares) <= 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        expectation = "three positive numbers that sum to 1"
        raise ArgumentError(sentence("shares", expectation, tuple(shares), f"The default is {SEQUENCE_SHARES}."))
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))
    first = round(len(order) * shares[0])
    second = round(len(order) * (shares[0] + shares[1]))
    parts = order[:first], order[first:second], order[second:]
    if not all(len(part) for part in parts):
        raise DataError(
            f"{sequences.name} has {len(sequences)} sequences, too few to be divided into training, validation and "
            f"test sequences by the shares {tuple(shares)}. Give more sequences, or three files."
        )
    train, valid, test = (sequences.selected(part) for part in parts)
    return train, valid, test


def classes_of(sequences: Sequences) -> tuple[str, ...]:
    """Return the distinct labels, sorted as numbers when all of them are integers and otherwise as text.

    Args:
        sequences: The sequences, with labels.

    Raises:
        DataError: There are fewer than two distinct labels, or no labels.
    """
    labels = set(_labels(sequences))
    try:
        classes = tuple(sorted(labels, key=lambda label: (int(label), label)))
    except ValueError:
        classes = tuple(sorted(labels))
    if len(classes) < 2:
        raise DataError(
            f"{sequences.name} has one label only, {', '.join(map(repr, classes))}: there is nothing to classify. "
            "Give sequences of at least two classes."
        )
    return classes


def class_numbers(sequences: Sequences, classes: Sequence[str]) -> torch.Tensor:
    """Return the label of each sequence as its index in the classes, int64 [N].

    Args:
        sequences: The sequences, with labels.
        classes: The classes that `classes_of` returns.

    Raises:
        DataError: A label is none of the classes, or there are no labels.
    """
    number = {name: index for index, name in enumerate(classes)}
    labels = _labels(sequences)
    for index, label in enumerate(labels):
        if label not in number:
            known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
            raise DataError(
                f"{sequences.place(index)}: the label {label!r} was not seen in training; known are {known}. Correct "
                "the label, leave the sequence out, or train with sequences that have it."
            )
    return torch.tensor([number[label] for label in labels], dtype=torch.int64)


def _labels(sequences: Sequences) -> np.ndarray:
    if sequences.labels is None:
        raise DataError(f"{sequences.name} has no labels. Give sequences of which the answers are known.")
    return sequences.labels

"""What the loop asks of those it works with: batches, a model, and whoever is told how it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from gatewise.training.history import Evaluation, Progress


class Batch(Protocol):
    """What the loop needs to know of a batch."""

    @property
    def count(self) -> int:
        """How many tokens the mean loss of this batch is over."""
        ...


class Batches(Protocol):
    """Data that comes in epochs, on the device already."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        ...

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from number `start` on; the same epoch always yields the same."""
        ...


class Trainable(Protocol):
    """What the loop needs of a model, which is a `torch.nn.Module` besides."""

    def loss(self, batch: Any, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of a batch, and the state for the next.

        The state is None, a tensor, or tuples of these; None comes in at the beginning of an epoch. The loop detaches
        it.
        """
        ...


class Observer(Protocol):
    """Somebody who is told how training goes."""

    def started(self, step: int, history: Sequence[Evaluation]) -> None:
        """Hear that training begins, or goes on after `step` steps with these evaluations behind it."""
        ...

    def progressed(self, progress: Progress) -> None:
        """Hear where training is, about twice a second."""
        ...

    def evaluated(self, evaluation: Evaluation) -> None:
        """Hear of a validation loss."""
        ...

    def remarked(self, sentence: str) -> None:
        """Hear something about how training runs that is worth a line."""
        ...

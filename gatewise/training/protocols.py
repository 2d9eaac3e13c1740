"""The interfaces of the training loop: batches, models and observers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from gatewise.training.history import Evaluation, Progress


class Batch(Protocol):
    """The interface of a batch."""

    @property
    def count(self) -> int:
        """The number of tokens over which the mean loss of this batch is computed."""
        ...


class Batches(Protocol):
    """The interface of training data: epochs of batches, already on the device."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        ...

    def windows(self, epoch: int = 0, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch, from number `start` on; the same epoch always yields the same batches."""
        ...


class Trainable(Protocol):
    """The interface of a model, which must also be a `torch.nn.Module`."""

    def loss(self, batch: Any, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return the mean loss of a batch, and the state for the next batch.

        The state is None, a tensor, or tuples of these; it is None at the beginning of an epoch. The loop detaches it.
        """
        ...


class Observer(Protocol):
    """The interface of an object that is notified about the progress of training."""

    def started(self, step: int, history: Sequence[Evaluation]) -> None:
        """Called when training starts, or is resumed after `step` steps with the given earlier evaluations."""
        ...

    def progressed(self, progress: Progress) -> None:
        """Called about twice a second with the progress."""
        ...

    def evaluated(self, evaluation: Evaluation) -> None:
        """Called after each evaluation."""
        ...

    def remarked(self, sentence: str) -> None:
        """Called with a remark about the run, for example that its steps are captured as a CUDA graph."""
        ...

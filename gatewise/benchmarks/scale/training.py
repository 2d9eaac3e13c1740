"""The interface of what the benchmark trains."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn

from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.scale.language_model import LanguageModelTraining
from gatewise.benchmarks.scale.translation import TranslationTraining
from gatewise.benchmarks.scale.ways import Way, Ways
from gatewise.training.graph import TrainBatch
from gatewise.training.processes import Processes


class Training(Protocol):
    """The training of a model, which is a dataclass, with a batch of the same size in each process.

    Attributes:
        model: The name of the model for `--model`.
        ways: The ways to train it.
    """

    model: ClassVar[str]
    ways: ClassVar[Ways]

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the training whose fields `dataclasses.asdict` returned."""
        ...

    @property
    def name(self) -> str:
        """The name of the case."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """All values that define the case, by name."""
        ...

    @property
    def words(self) -> int:
        """The number of words in the batch of one process, which are those that the model predicts."""
        ...

    @property
    def dropout(self) -> float:
        """The dropout probability of the timed steps."""
        ...

    def with_batch(self, batch: int) -> Self:
        """Return the training of the same model with another batch in each process."""
        ...

    def starting_weights(self, device: torch.device, seed: int) -> Any:
        """Draw the initial weights, the same for all ways; a seed gives the same weights again."""
        ...

    def batches(self, count: int, device: torch.device, seed: int) -> Sequence[Any]:
        """Draw batches; a seed gives the same batches again."""
        ...

    def first_state(self, device: torch.device) -> Any:
        """Return the state before the first batch."""
        ...

    def step(
        self, way: Way, start: Any, precision: Precision, processes: Processes, *, dropout: float
    ) -> contextlib.AbstractContextManager[tuple[TrainBatch, nn.Module]]:
        """Yield a function that trains on a batch, from (batch, state) to (mean loss, state), and its model.

        The step of a training command is captured as a CUDA graph where that is possible, as there.

        Args:
            way: The way.
            start: The initial weights that `starting_weights` returned.
            precision: The precision.
            processes: The processes.
            dropout: The dropout probability.
        """
        ...


TRAININGS: dict[str, type[Training]] = {each.model: each for each in (LanguageModelTraining, TranslationTraining)}
"""The kinds of training by the name of their model."""

"""Scalars and histograms for TensorBoard."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from gatewise.contract.errors import CheckpointError, MissingExtra
from gatewise.training.history import PERPLEXITY, Evaluation, Measure, Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSummaries:
    """An observer that writes losses, scores, learning rate and speed by step.

    Args:
        folder: The folder for the event files.
        begun: A function that is called with the new files when training starts; None for no call.
        measure: The format of losses.
        unit: The unit of tokens, in the plural.
        model: The model whose weights and last gradients are written as histograms at each evaluation; None for none.
    """

    def __init__(
        self,
        folder: Path,
        measure: Measure = PERPLEXITY,
        unit: str = "tokens",
        model: nn.Module | None = None,
        begun: Callable[[list[Path]], None] | None = None,
    ) -> None:
        self._folder = folder
        self._measure = measure
        self._speed = f"{unit}_per_second"
        self._model = model
        self._begun = begun
        self._writer: SummaryWriter | None = None

    def started(self, step: int, history: Sequence[Evaluation]) -> None:
        """Open a file; values beyond `step` from before the run was resumed are hidden."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise MissingExtra.for_package("tensorboard", "writing summaries", "train") from None
        with self._sentences():
            before = set(self._folder.glob("*"))
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
            if self._begun is not None:
                self._begun(sorted(set(self._folder.glob("*")) - before))

    def close(self) -> None:
        """Write all buffered values."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with self._sentences():
                writer.close()

    def progressed(self, progress: Progress) -> None:
        """Write the current training loss, learning rate and speed."""
        values = {
            f"train/{self._measure.name}": self._measure.of(progress.loss),
            "train/learning_rate": progress.learning_rate,
            f"train/{self._speed}": progress.tokens_per_second,
        }
        self._write(values, progress.step)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Write the losses and scores of an evaluation, and the histograms."""
        losses = {"train": evaluation.train_loss, "valid": evaluation.valid_loss}
        values = {f"epoch/{part}_{self._measure.name}": self._measure.of(loss) for part, loss in losses.items()}
        values |= {f"epoch/valid_{name}": score for name, score in evaluation.scores.items()}
        self._write(values | {f"epoch/{self._speed}": evaluation.tokens_per_second}, evaluation.step)
        writer = self._open_writer()
        with self._sentences():
            for name, parameter in self._model.named_parameters() if self._model is not None else ():
                writer.add_histogram(f"weights/{name}", parameter, evaluation.step)
                if parameter.grad is not None and parameter.grad.isfinite().all():
                    writer.add_histogram(f"gradients/{name}", parameter.grad, evaluation.step)

    def remarked(self, sentence: str) -> None:
        """Ignore remarks."""

    def _write(self, values: Mapping[str, float], step: int) -> None:
        writer = self._open_writer()
        with self._sentences():
            for name, value in values.items():
                writer.add_scalar(name, value, step)

    def _open_writer(self) -> SummaryWriter:
        assert self._writer is not None  # training calls `started` first
        return self._writer

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # When it is closed, the writer would try again to write the values that it could not write.
            self._writer = None
            remedy = "Free space on the disk, or make the folder writable"
            if error.errno in (errno.EEXIST, errno.ENOTDIR):
                remedy = "Move the file that is in the place of a folder"
            raise CheckpointError(
                f"{self._folder} cannot be written: {error.strerror or error}. {remedy}, and resume by `--resume`."
            ) from error

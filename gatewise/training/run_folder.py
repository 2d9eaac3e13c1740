"""The folder of one training run, and whether it can hold what will be written."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from torch import nn

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.training.options import TrainingOptions

_ROOM_FOR_LOGS = 32 * 2**20


class RunFolder:
    """Names of the files of a run.

    Args:
        path: The folder; made by `prepare`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        self.recipe = path / "recipe.toml"
        self.tokenizer = path / "tokenizer.json"
        self.checkpoint = path / "checkpoint.safetensors"
        self.model = path / "model.safetensors"
        self.last = path / "last.safetensors"
        self.result = path / "result.json"
        self.fault = path / "fault.safetensors"
        self.curves = path / "curves.png"
        self.confusion = path / "confusion.png"
        self.tensorboard = path / "tensorboard"

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.recipe.exists() or self.checkpoint.exists()

    def prepare(self, needed_bytes: int) -> None:
        """Make the folder, or say before anything is trained that nothing could be saved in it.

        Args:
            needed_bytes: How much the run will write; see `bytes_of_run`.

        Raises:
            ArgumentError: The folder cannot be made or written, or its disk has too little room.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"gatewise")
                probe.flush()
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise ArgumentError(
                sentence("output", "a folder that can be written", str(self.path), f"{error.strerror}: choose another.")
            ) from error
        if free < needed_bytes:
            raise ArgumentError(
                f"`output` must be on a disk with {_mebibytes(needed_bytes)} free for checkpoints, {self.path} has "
                f"{_mebibytes(free)}. Make room, or choose another folder."
            )
        self._remove_half_written()

    def clear(self) -> None:
        """Remove the files of an earlier run, and nothing else."""
        plots = self.curves, self.confusion
        for file in (
            self.checkpoint,
            self.recipe,
            self.tokenizer,
            self.model,
            self.last,
            self.result,
            self.fault,
            *plots,
        ):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.tensorboard, ignore_errors=True)

    def _remove_half_written(self) -> None:
        for rest in self.path.glob(".*.tmp"):
            rest.unlink(missing_ok=True)


def bytes_of_run(model: nn.Module, options: TrainingOptions) -> int:
    """Return how much disk a run needs at most: two checkpoints and two models, while one replaces the other."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    moments = {"sgd": 1 if options.momentum else 0, "adam": 2, "adamw": 2}[options.optimizer]
    averages = {"none": 0, "last": options.average_last - 1}.get(options.average, 1)
    copies = 1 + moments + averages
    return 2 * weights * (copies + 1) + _ROOM_FOR_LOGS


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"

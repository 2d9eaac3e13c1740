"""Reading the model file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from gatewise.contract.errors import CheckpointError
from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import MODEL


def read_model_file(path: Path, task: str) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """Return the path of a model file, its weights, and its metadata.

    Args:
        path: The folder of a run, or a model file.
        task: The command under `gatewise train` that writes such files, for the advice.

    Raises:
        CheckpointError: There is no model, or the file is not one.
    """
    file = RunFolder(path).model if path.is_dir() else path
    if not file.exists():
        where = "has no model yet: training saves one at its first evaluation" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {where}. Give the folder of a run of gatewise train {task}.")
    return file, *read_tensors(file, MODEL)


def missing_from(error: Exception) -> str:
    """Return a description of the defect in a model file's metadata, given the error that it caused."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)

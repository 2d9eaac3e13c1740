"""Reading the model file of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from gatewise.contract.errors import CheckpointError, KernelRefused, MissingExtra
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


@contextlib.contextmanager
def metadata_of(file: Path, kind: str, task: str) -> Iterator[None]:
    """Raise an error that names the file if its metadata are not those of such a model.

    Args:
        file: The model file, whose metadata the context reads.
        kind: The kind of content that the file should hold, with its article, such as "a model".
        task: The command under `gatewise train` that writes such files, for the advice.

    Raises:
        CheckpointError: The context raised an error about a value.
    """
    try:
        yield
    except (CheckpointError, KernelRefused, MissingExtra):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = missing_from(error).rstrip(".")
        raise CheckpointError(f"{file} is not {kind}: {reason}. Give a run folder of gatewise train {task}.") from error


def missing_from(error: Exception) -> str:
    """Return a description of the defect in a model file's metadata, given the error that it caused."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)

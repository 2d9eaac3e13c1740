"""Reading the sequences of a recipe's section `[data]`, and making batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gatewise.cli.classifier_recipe import DIGITS, SYNTHETIC, DataOptions
from gatewise.contract.errors import ArgumentError, DataError, sentence
from gatewise.data import (
    Columns,
    SequenceBatches,
    Sequences,
    class_numbers,
    classes_of,
    digits,
    divide_sequences,
    read_sequences,
    synthetic,
)
from gatewise.training.processes import Processes

SPLITS = ("train", "valid", "test")
_BUILT_IN = {DIGITS: digits, SYNTHETIC: synthetic}


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceMaterial:
    """The sequences of a run.

    Attributes:
        name: The source of the sequences.
        parts: The sequences of each part.
        classes: The names of the classes; empty for a regression.
    """

    name: str
    parts: dict[str, Sequences]
    classes: tuple[str, ...]


def files_of(options: DataOptions) -> dict[str, Path]:
    """Return the files that a recipe names, by their keys."""
    files = {split: getattr(options, split) for split in SPLITS}
    if not any(files.values()) and options.source not in _BUILT_IN:
        files = {"source": options.source}
    return {key: Path(path) for key, path in files.items() if path}


def material_of(options: DataOptions) -> SequenceMaterial:
    """Read the data that a recipe names, and split it if it is one file.

    Raises:
        ArgumentError: Only one or two of the three files are given, or a regression uses a built-in classification
            task.
        DataError: A file cannot be used for training.
    """
    files = {split: getattr(options, split) for split in SPLITS}
    if any(files.values()):
        if not all(files.values()):
            given = ", ".join(split for split in SPLITS if files[split])
            advice = "Or give one file by `--data`; it will be split."
            raise ArgumentError(sentence("train, valid, test", "three files", f"only `{given}`", advice))
        return _from_files(options, files)
    if options.source in _BUILT_IN:
        if options.numbers:
            raise ArgumentError(sentence("task", f"classification for {options.source}", repr(options.task)))
        whole = _BUILT_IN[options.source]()
    else:
        whole = read_sequences(options.source, options.columns, numbers=options.numbers)
    classes = () if options.numbers else classes_of(whole)
    parts = divide_sequences(whole, options.shares, options.division_seed)
    return SequenceMaterial(Path(whole.name).name, dict(zip(SPLITS, parts, strict=True)), classes)


def _from_files(options: DataOptions, files: dict[str, str]) -> SequenceMaterial:
    train = read_sequences(files["train"], options.columns, numbers=options.numbers)
    columns = options.columns if files["train"].endswith(".npz") else reading(options, train.features)
    parts = {"train": train}
    for split in SPLITS[1:]:
        parts[split] = read_sequences(files[split], columns, numbers=options.numbers)
        check_features(parts[split], train.features)
    return SequenceMaterial(Path(train.name).name, parts, () if options.numbers else classes_of(train))


def reading(options: DataOptions, features: Sequence[str]) -> Columns:
    """Return the columns to read from a table, given the features of the training sequences."""
    return dataclasses.replace(options.columns, features=tuple(features))


def check_features(sequences: Sequences, features: Sequence[str]) -> None:
    """Check that sequences have the features of the training sequences."""
    if len(sequences.features) != len(features):
        raise DataError(
            f"{sequences.name} has {len(sequences.features)} features per step, the training sequences have "
            f"{len(features)}. Give every step the same features."
        )


def targets_of(sequences: Sequences, classes: Sequence[str]) -> torch.Tensor:
    """Return the targets [N]: int64 classes, or float32 numbers; zeros if there are no labels."""
    if sequences.labels is None:
        return torch.zeros(len(sequences), dtype=torch.int64 if classes else torch.float32)
    if classes:
        return class_numbers(sequences, classes)
    return torch.from_numpy(np.asarray(sequences.labels, dtype=np.float32))


def batches_of(
    sequences: Sequences, classes: Sequence[str], options: DataOptions, processes: Processes, seed: int | None = None
) -> SequenceBatches:
    """Return batches for training if a seed is given, otherwise for evaluation."""
    return SequenceBatches(
        sequences,
        targets_of(sequences, classes),
        options.evaluation_batch_size if seed is None else options.batch_size,
        device=processes.device,
        rank=processes.rank,
        processes=processes.count,
        shuffle=seed is not None,
        seed=seed or 0,
    )

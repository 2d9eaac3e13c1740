"""Model files of classifiers: weights, sizes, classes, and how the data was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gatewise.cli.classifier_recipe import ClassifierOptions, DataOptions
from gatewise.cli.model_file import metadata_of, read_model_file
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.models import SequenceClassifier
from gatewise.training.snapshot import load_weights


@dataclasses.dataclass(frozen=True, slots=True)
class SavedClassifier:
    """A trained classifier.

    Attributes:
        model: The model, in evaluation mode.
        classes: The names of the classes; empty for a regression.
        features: The names of the features of each step.
        data: The options with which the sequences were read.
    """

    model: SequenceClassifier
    classes: tuple[str, ...]
    features: tuple[str, ...]
    data: DataOptions


def build_classifier(sizes: dict[str, Any], device: torch.device) -> SequenceClassifier:
    """Create a classifier on the CPU, so that a seed gives the same weights for every device, and move it."""
    return SequenceClassifier(**sizes).to(device)


def classifier_sizes(options: ClassifierOptions, features: int, classes: int) -> dict[str, Any]:
    """Return the arguments of `SequenceClassifier`."""
    return {"input_size": features, "classes": classes} | dataclasses.asdict(options)


def classifier_facts(
    sizes: dict[str, Any], classes: Sequence[str], features: Sequence[str], data: DataOptions
) -> dict[str, Any]:
    """Return the metadata of a model file."""
    return {
        "classifier": sizes,
        "classes": list(classes),
        "features": list(features),
        "data": dataclasses.asdict(data),
    }


def load_classifier(path: Path, device: torch.device, kernel: str | None = None) -> SavedClassifier:
    """Read a trained classifier.

    Args:
        path: The folder of a run, or a model file.
        device: The device of the model.
        kernel: The kernel of the LSTM; None for the kernel that it was trained with.

    Raises:
        CheckpointError: There is no model, or the file is not one.
    """
    file, tensors, facts = read_model_file(path, "classify")
    with metadata_of(file, "a classifier", "classify"):
        sizes = facts["classifier"] | ({"kernel": kernel} if kernel else {})
        data = DataOptions(**{name: _tuple(value) for name, value in facts["data"].items()})
        classes, features = _names(facts, "classes"), _names(facts, "features")
        model = build_classifier(sizes, device)
    load_weights(model, tensors, file)
    return SavedClassifier(model.eval(), classes, features, data)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _names(facts: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of strings from the metadata of a model file."""
    names = facts[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(sentence(key, "a list of strings", repr(names)))
    return tuple(names)

"""Classifiers on disk: one file with weights, sizes, classes and how its data was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gatewise.cli.classifier_recipe import ClassifierOptions, DataOptions
from gatewise.cli.model_file import lack, read_model_file
from gatewise.contract.errors import CheckpointError
from gatewise.models import SequenceClassifier
from gatewise.training.snapshot import load_weights


@dataclasses.dataclass(frozen=True, slots=True)
class SavedClassifier:
    """A trained classifier.

    Attributes:
        model: In evaluation mode.
        classes: Names of the classes; empty when it answers with a number.
        features: What it reads at each step.
        data: How its sequences were read.
    """

    model: SequenceClassifier
    classes: tuple[str, ...]
    features: tuple[str, ...]
    data: DataOptions


def build_classifier(sizes: dict[str, Any], device: torch.device) -> SequenceClassifier:
    """Make a classifier on the CPU, so that a seed gives the same weights for every device, and move it."""
    return SequenceClassifier(**sizes).to(device)


def classifier_sizes(options: ClassifierOptions, features: int, classes: int) -> dict[str, Any]:
    """Return the arguments of `SequenceClassifier`."""
    return {"input_size": features, "classes": classes} | dataclasses.asdict(options)


def classifier_facts(
    sizes: dict[str, Any], classes: Sequence[str], features: Sequence[str], data: DataOptions
) -> dict[str, Any]:
    """Return what is saved beside the weights."""
    return {
        "classifier": sizes,
        "classes": list(classes),
        "features": list(features),
        "data": dataclasses.asdict(data),
    }


def load_classifier(path: Path, device: torch.device, kernel: str | None = None) -> SavedClassifier:
    """Read a trained classifier.

    Args:
        path: A run folder, or a model file.
        device: Where to.
        kernel: Which kernel the LSTM shall ask for; None keeps the one it was trained with.

    Raises:
        CheckpointError: There is no model, or the file is not one.
    """
    file, tensors, facts = read_model_file(path, "classify")
    try:
        sizes = facts["classifier"] | ({"kernel": kernel} if kernel else {})
        data = DataOptions(**{name: _tuple(value) for name, value in facts["data"].items()})
        classes, features = tuple(facts["classes"]), tuple(facts["features"])
        model = build_classifier(sizes, device)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is not a classifier: {lack(error)}. Give a run folder of gatewise train classify."
        ) from error
    load_weights(model, tensors)
    return SavedClassifier(model.eval(), classes, features, data)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

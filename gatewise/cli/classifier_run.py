"""A run of `gatewise train classify`: sequences, model, training, scores."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from gatewise.cli.classifier_data import SPLITS, SequenceMaterial, batches_of, material_of, targets_of
from gatewise.cli.classifier_recipe import DIGITS, SYNTHETIC, ClassifierRecipe
from gatewise.cli.classifier_scores import (
    main_score,
    metrics,
    plot_predictions,
    predictions_of,
    print_scores,
    scores_of,
)
from gatewise.cli.launch import Task
from gatewise.cli.recipe import to_toml
from gatewise.cli.reference import loss_on_test_data, reference_of
from gatewise.cli.run_report import (
    compare,
    decide,
    field,
    introduce,
    note_unlearned,
    print_early_stop,
    steps_in_all,
    watching,
)
from gatewise.cli.saved_classifier import build_classifier, classifier_facts, classifier_sizes, load_classifier
from gatewise.contract.decision import Decision
from gatewise.data import SequenceBatches
from gatewise.files import write_bytes
from gatewise.models import SequenceClassifier
from gatewise.training import RunFolder, fit
from gatewise.training.curves import plot_curves
from gatewise.training.history import Measure
from gatewise.training.json_values import to_json
from gatewise.training.loop import Outcome
from gatewise.training.processes import Processes
from gatewise.training.run_folder import bytes_of_run

_UNIT = "sequences"


def train_classifier(recipe: ClassifierRecipe, folder: RunFolder, processes: Processes, console: Console) -> Outcome:
    """Train as the recipe says, or resume the run in the folder, and compute the scores.

    Args:
        recipe: The recipe.
        folder: The folder of the run; if it contains a checkpoint, the run is resumed.
        processes: The processes of the distributed training.
        console: The console for the report; silent in all processes but the first.

    Returns:
        The outcome of the training.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    metrics()  # a missing package is an error now rather than after the first epoch
    if processes.first:
        folder.prepare(0)
    material = material_of(recipe.data)
    batches = {
        split: batches_of(
            part, material.classes, recipe.data, processes, recipe.training.seed if split == "train" else None
        )
        for split, part in material.parts.items()
    }
    train = material.parts["train"]
    sizes = classifier_sizes(recipe.model, len(train.features), len(material.classes))
    torch.manual_seed(recipe.training.seed)
    model = build_classifier(sizes, processes.device)
    if recipe.data.standardize:
        numbers = None if material.classes else targets_of(train, ())
        model.standardize(train.values, numbers)
    torch.manual_seed(recipe.training.seed + 1 + processes.rank)
    decision = _decision(recipe, batches["train"], model, processes)
    if processes.first:
        folder.prepare(bytes_of_run(model, recipe.training))
        write_bytes(folder.recipe, to_toml(recipe).encode())
    _describe(console, recipe, material, batches["train"], model, processes, folder, decision)
    outcome = _train(model, material, batches, sizes, recipe, folder, processes, console, decision)
    if outcome.interrupted:
        return outcome
    processes.barrier()
    best = load_classifier(folder.path, processes.device).model
    reference = reference_of("classify", best, decision, folder, processes)
    facts = classifier_facts(sizes, material.classes, train.features, recipe.data)
    test_loss = loss_on_test_data(best, batches["test"], recipe.training, folder, processes, reference, facts)
    predicted = predictions_of(best, batches["test"], processes, recipe.training.precision)
    if predicted is not None:
        _finish(console, recipe, folder, outcome, material, test_loss, predicted)
    return outcome


CLASSIFIER = Task(
    "classify",
    ClassifierRecipe(),
    train_classifier,
    "data",
    ("source", "train", "valid", "test"),
    (DIGITS, SYNTHETIC),
    files=("confusion",),
    advice="Reduce `--batch-size`, `--hidden-size` or `--set evaluation_batch_size=N`.",
)


def _decision(
    recipe: ClassifierRecipe, batches: SequenceBatches, model: SequenceClassifier, processes: Processes
) -> Decision:
    """Return the decision about the kernel that trains the model."""
    shape = (batches.longest, recipe.data.batch_size // processes.count, model.lstm.input_size)
    return decide(model.lstm, shape, recipe.training.precision, lengths=batches.ragged or None)


def _train(
    model: SequenceClassifier,
    material: SequenceMaterial,
    batches: dict[str, SequenceBatches],
    sizes: dict[str, Any],
    recipe: ClassifierRecipe,
    folder: RunFolder,
    processes: Processes,
    console: Console,
    decision: Decision,
) -> Outcome:
    train = material.parts["train"]
    targets = targets_of(train, material.classes)
    digest = hashlib.sha256(train.values.numpy().tobytes() + train.lengths.numpy().tobytes())
    digest.update(targets.numpy().tobytes())
    identity = {
        **{name: size for name, size in sizes.items() if name != "kernel"},
        "training data": digest.hexdigest()[:16],
    }
    epochs = recipe.training.epochs
    with watching(console, folder, processes, epochs, _UNIT, _measure(material), model) as observers:
        return fit(
            model,
            batches["train"],
            batches["valid"],
            recipe.training,
            folder,
            processes,
            identity=identity,
            model_facts=classifier_facts(sizes, material.classes, train.features, recipe.data),
            observers=observers,
            reference=reference_of("classify", model, decision, folder, processes),
            score=_score(model, material, batches["valid"], processes, recipe.training.precision),
        )


def _score(
    model: SequenceClassifier,
    material: SequenceMaterial,
    batches: SequenceBatches,
    processes: Processes,
    precision: str,
) -> Callable[[], dict[str, float]]:
    """Return a function that computes the validation score, with the same result in every process."""
    targets = targets_of(material.parts["valid"], material.classes).numpy()

    def score() -> dict[str, float]:
        predicted = predictions_of(model, batches, processes, precision)
        name, value = (
            main_score(scores_of(predicted, targets, material.classes)) if predicted is not None else ("", 0.0)
        )
        return processes.broadcast({name: value})

    return score


def _measure(material: SequenceMaterial) -> Measure:
    return Measure("loss", "loss", float, digits=4, score="accuracy" if material.classes else "R2")


def _describe(
    console: Console,
    recipe: ClassifierRecipe,
    material: SequenceMaterial,
    batches: SequenceBatches,
    model: SequenceClassifier,
    processes: Processes,
    folder: RunFolder,
    decision: Decision,
) -> None:
    train, options = material.parts["train"], recipe.model
    counts = ", ".join(f"{split} {len(material.parts[split]):,}" for split in SPLITS)
    shortest, longest = int(train.lengths.min()), int(train.lengths.max())
    steps = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    task = f"one of {len(material.classes)} classes" if material.classes else "a number"
    weights = sum(parameter.numel() for parameter in model.parameters())
    both = "bidirectional " if options.bidirectional else ""
    shape = f"{options.num_layers} x {options.hidden_size} {both}LSTM, {options.pooling} over time"
    share = recipe.data.batch_size // processes.count
    lines = {
        "data": f"{material.name}: {counts}",
        "reads": f"{steps} steps of {len(train.features)} features; predicts {task}",
        "model": f"{shape}, {weights:,} weights",
        "steps": steps_in_all(recipe.training, len(batches)),
        "folder": str(folder.path),
        "workers": f"{processes.count} processes, {share} sequences of each batch" if processes.count > 1 else "",
    }
    introduce(console, recipe, lines, decision)


def _finish(
    console: Console,
    recipe: ClassifierRecipe,
    folder: RunFolder,
    outcome: Outcome,
    material: SequenceMaterial,
    test_loss: float,
    predicted: np.ndarray,
) -> None:
    measure = _measure(material)
    best = min(outcome.history, key=lambda evaluation: evaluation.valid_loss)
    targets = targets_of(material.parts["test"], material.classes).numpy()
    test = scores_of(predicted, targets, material.classes)
    name, value = main_score(test)
    result = {
        "valid_loss": best.valid_loss,
        f"valid_{measure.score.lower()}": best.scores[measure.score],
        "test_loss": test_loss,
        **{f"test_{each}": score for each, score in test.items()},
        "minutes": outcome.seconds / 60,
    }
    write_bytes(folder.result, to_json(result, indent=2).encode() + b"\n")
    plot_curves(folder.curves, outcome.history, _UNIT, measure=measure)
    plot_predictions(folder.confusion, predicted, targets, material.classes)
    console.print()
    print_early_stop(console, outcome, recipe.training)
    field(
        console, "valid", f"{name} {best.scores[measure.score]:.4f}, loss {best.valid_loss:.4f} (epoch {best.epoch:g})"
    )
    field(console, "test", f"{name} {value:.4f}, loss {test_loss:.4f}")
    guessed = np.bincount(targets).max() / len(targets) if material.classes else 0.0
    if material.classes:
        field(console, "guessing", f"always the most frequent class: accuracy {guessed:.4f}")
        unlearned = "the accuracy is not above that of guessing" if value <= guessed else ""
    else:
        unlearned = "the model is no better than the mean of the targets" if value <= guessed else ""
    note_unlearned(console, outcome, recipe.training, unlearned)
    compare(console, recipe.expect, result, at_least=("test_accuracy", "test_r2"))
    console.print()
    print_scores(console, test)
    console.print()
    field(console, "plots", escape(f"{folder.curves}, {folder.confusion.name}"))
    command = shlex.join(["gatewise", "evaluate", "--checkpoint", str(folder.path), "--data", "FILE"])
    console.print(f"[dim]Evaluate other sequences:[/dim] {escape(command)}", highlight=False, soft_wrap=True)

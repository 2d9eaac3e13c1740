"""Predictions of a classifier, their scores, and how these are printed, plotted and written."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gatewise.contract.errors import MissingExtra, NotFinite
from gatewise.data import SequenceBatches, Sequences
from gatewise.files import write_bytes
from gatewise.models import SequenceClassifier
from gatewise.training.confusion import plot_confusion, plot_numbers
from gatewise.training.precision import arithmetic, autocast
from gatewise.training.processes import Processes

_MOST_CLASSES = 40
"""The largest number of classes for which each class has its own line on the terminal."""


_MOST_IN_MATRIX = 1000
"""The largest number of rows and columns of a confusion matrix: a million counts are already more than anyone reads."""


def predictions_of(
    model: SequenceClassifier, batches: SequenceBatches, processes: Processes, precision: str = "float32"
) -> np.ndarray | None:
    """Return the model's prediction for each sequence, in evaluation mode.

    Returns:
        In the first process, the probabilities of classes [N, C] or the predicted numbers [N], float64, in the order of
        the sequences; None in the others.
    """
    was_training = model.training
    model.eval()
    rows, predicted = [], []
    with torch.no_grad(), arithmetic(precision):
        for batch in batches.windows():
            with autocast(precision, processes.device):
                output = model(batch.inputs, batch.lengths)
            rows.append(batch.rows)
            predicted.append(output.double().softmax(-1) if model.classes else output.double())
    model.train(was_training)
    own = (torch.cat(rows).cpu().numpy(), torch.cat(predicted).cpu().numpy()) if rows else None
    parts = [part for part in processes.gather(own) if part is not None]
    if not processes.first:
        return None
    order = np.concatenate([part[0] for part in parts])
    together = np.concatenate([part[1] for part in parts])
    return together[order.argsort()]


def metrics() -> ModuleType:
    """Return `sklearn.metrics`.

    Raises:
        MissingExtra: scikit-learn is not installed.
    """
    try:
        from sklearn import metrics
    except ModuleNotFoundError:
        raise MissingExtra.for_package("scikit-learn", "scoring a classifier", "train") from None
    return metrics


def scores_of(predicted: np.ndarray, targets: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """Return all scores by name, as JSON values; 0 divided by 0 counts as 0.

    The confusion matrix is left out for more than `_MOST_IN_MATRIX` classes, where it would take gigabytes.

    Args:
        predicted: The result of `predictions_of`.
        targets: The targets [N].
        classes: The names of the classes; empty for a regression.

    Raises:
        NotFinite: A prediction is infinite or NaN.
        MissingExtra: scikit-learn is not installed.
    """
    if not np.isfinite(predicted).all():
        raise NotFinite(
            f"the model's predictions must be finite to be scored, got {predicted[~np.isfinite(predicted)][0]}. Check "
            "its weights and the sequences."
        )
    library = metrics()
    if not classes:
        targets = targets.astype(np.float64)
        # R2 of a single number is undefined; repeating the number gives the result for equal targets.
        pair = (targets, predicted) if len(targets) > 1 else (targets.repeat(2), predicted.repeat(2))
        return {
            "mse": float(library.mean_squared_error(targets, predicted)),
            "mae": float(library.mean_absolute_error(targets, predicted)),
            "r2": float(library.r2_score(*pair)),
        }
    taken, labels = predicted.argmax(1), range(len(classes))
    precision, recall, f1, counts = library.precision_recall_fscore_support(
        targets, taken, labels=labels, zero_division=0.0
    )
    each = precision, recall, f1, counts.astype(np.int64)  # scikit-learn has floats if no prediction is right
    few = len(classes) <= _MOST_IN_MATRIX
    matrix = {"confusion": _confusion(targets, taken, len(classes)).tolist()} if few else {}
    return {
        "accuracy": float(library.accuracy_score(targets, taken)),
        "macro_precision": float(precision.mean()),
        "macro_recall": float(recall.mean()),
        "macro_f1": float(f1.mean()),
        "classes": {
            name: dict(zip(("precision", "recall", "f1", "sequences"), figures, strict=True))
            for name, *figures in zip(classes, *(column.tolist() for column in each), strict=True)
        },
    } | matrix


def _confusion(targets: np.ndarray, taken: np.ndarray, classes: int) -> np.ndarray:
    return metrics().confusion_matrix(targets, taken, labels=range(classes))


def main_score(scores: dict[str, Any]) -> tuple[str, float]:
    """Return the name and value of the score that is shown after each epoch."""
    return ("accuracy", scores["accuracy"]) if "accuracy" in scores else ("R2", scores["r2"])


def print_scores(console: Console, scores: dict[str, Any]) -> None:
    """Print the scores of each class, or those of a regression."""
    if "accuracy" not in scores:
        text = f"MSE {scores['mse']:.6g}, MAE {scores['mae']:.6g}, R2 {scores['r2']:.4f}"
        console.print(text, highlight=False)
        return
    table = Table("class", box=None, pad_edge=False, header_style="bold")
    for name in ("precision", "recall", "F1", "sequences"):
        table.add_column(name, justify="right")
    lines = list(scores["classes"].items())
    for name, each in lines if len(lines) <= _MOST_CLASSES else ():
        figures = (f"{each[figure]:.3f}" for figure in ("precision", "recall", "f1"))
        table.add_row(escape(name), *figures, f"{each['sequences']:,}")
    total = sum(each["sequences"] for _, each in lines)
    means = (f"{scores[f'macro_{figure}']:.3f}" for figure in ("precision", "recall", "f1"))
    table.add_row("mean over classes", *means, f"{total:,}", style="bold")
    console.print(table)


def plot_predictions(path: Path, predicted: np.ndarray, targets: np.ndarray, classes: Sequence[str]) -> None:
    """Plot the confusion matrix, or predicted numbers against targets, to a PNG file."""
    if classes:
        together = math.ceil(len(classes) / _MOST_IN_MATRIX)
        names = classes[::together]
        counts = _confusion(targets // together, predicted.argmax(1) // together, len(names))
        plot_confusion(path, counts, names, together)
    else:
        plot_numbers(path, targets, predicted)


def write_predictions(path: Path, sequences: Sequences, predicted: np.ndarray, classes: Sequence[str]) -> None:
    """Write a CSV file with one line per sequence: its name, its label if it has one, and the prediction."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    labels = sequences.labels
    writer.writerow(
        ["sequence", *(["label"] if labels is not None else []), "answer", *(["probability"] if classes else [])]
    )
    for number, output in enumerate(predicted):
        line = [sequences.ids[number], *([labels[number]] if labels is not None else [])]
        if classes:
            best = int(output.argmax())
            line += [classes[best], f"{output[best]:.6f}"]
        else:
            line.append(f"{output:.9g}")
        writer.writerow(line)
    write_bytes(path, text.getvalue().encode())

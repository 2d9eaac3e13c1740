"""What a classifier answers, how good that is, and how it is told."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gatewise.data import SequenceBatches, Sequences
from gatewise.files import write_bytes
from gatewise.models import SequenceClassifier
from gatewise.training.confusion import plot_confusion, plot_numbers
from gatewise.training.metrics import class_scores, confusion, number_scores
from gatewise.training.precision import arithmetic, autocast
from gatewise.training.processes import Processes

_MOST_CLASSES = 40
"""Classes up to which each has a line on the terminal."""


def answers_of(
    model: SequenceClassifier, batches: SequenceBatches, processes: Processes, precision: str = "float32"
) -> np.ndarray | None:
    """Return what the model answers to each sequence, in evaluation mode.

    Returns:
        In the first process, the probabilities of classes [N, C] or the numbers [N], float64, in the order of the
        sequences; None in the others.
    """
    was_training = model.training
    model.eval()
    rows, answers = [], []
    with torch.no_grad(), arithmetic(precision):
        for batch in batches.windows():
            with autocast(precision, processes.device):
                answer = model(batch.inputs, batch.lengths)
            rows.append(batch.rows)
            answers.append(answer.double().softmax(-1) if model.classes else answer.double())
    model.train(was_training)
    own = (torch.cat(rows).cpu().numpy(), torch.cat(answers).cpu().numpy()) if rows else None
    parts = [part for part in processes.gathered(own) if part is not None]
    if not processes.first:
        return None
    order = np.concatenate([part[0] for part in parts])
    together = np.concatenate([part[1] for part in parts])
    return together[order.argsort()]


def scores_of(answers: np.ndarray, targets: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """Return every score by name, as JSON.

    Args:
        answers: As `answers_of` returns them.
        targets: What should have been answered, [N].
        classes: Names of the classes; empty for numbers.
    """
    if not classes:
        scores = number_scores(targets.astype(np.float64), answers)
        return {"mse": scores.mse, "mae": scores.mae, "r2": scores.r2}
    counts = confusion(targets, answers.argmax(1), len(classes))
    scores = class_scores(counts)
    each = zip(classes, scores.precision, scores.recall, scores.f1, scores.support, strict=True)
    return {
        "accuracy": scores.accuracy,
        "macro_precision": float(scores.precision.mean()),
        "macro_recall": float(scores.recall.mean()),
        "macro_f1": float(scores.f1.mean()),
        "classes": {
            name: {"precision": float(precision), "recall": float(recall), "f1": float(f1), "sequences": int(support)}
            for name, precision, recall, f1, support in each
        },
        "confusion": counts.tolist(),
    }


def main_score(scores: dict[str, Any]) -> tuple[str, float]:
    """Return the score that is shown after each epoch."""
    return ("accuracy", scores["accuracy"]) if "accuracy" in scores else ("R2", scores["r2"])


def print_scores(console: Console, scores: dict[str, Any]) -> None:
    """Print the scores of each class, or those of numbers."""
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


def plot_answers(path: Path, answers: np.ndarray, targets: np.ndarray, classes: Sequence[str]) -> None:
    """Draw the confusion of classes, or numbers over their targets, into a PNG."""
    if classes:
        plot_confusion(path, confusion(targets, answers.argmax(1), len(classes)), classes)
    else:
        plot_numbers(path, targets, answers)


def write_answers(path: Path, sequences: Sequences, answers: np.ndarray, classes: Sequence[str]) -> None:
    """Write one line a sequence as CSV: its name, its label where that is known, and the answer."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    labels = sequences.labels
    writer.writerow(
        ["sequence", *(["label"] if labels is not None else []), "answer", *(["probability"] if classes else [])]
    )
    for number, answer in enumerate(answers):
        line = [sequences.ids[number], *([labels[number]] if labels is not None else [])]
        if classes:
            best = int(answer.argmax())
            line += [classes[best], f"{answer[best]:.6f}"]
        else:
            line.append(f"{answer:.9g}")
        writer.writerow(line)
    write_bytes(path, text.getvalue().encode())

"""Plots of predictions against targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gatewise.contract.errors import MissingExtra
from gatewise.training.pictures import save_picture

_MOST_NUMBERS = 20
"""The largest number of classes for which each cell shows its count."""


def plot_confusion(path: Path, counts: np.ndarray, classes: Sequence[str], together: int = 1) -> None:
    """Plot a confusion matrix to a PNG file; rows are the true classes, colours the fraction of the row.

    Args:
        path: The file.
        counts: The counts, int64 [C, C], as `sklearn.metrics.confusion_matrix` returns them.
        classes: The names of the classes.
        together: The number of classes that are counted together in each row and column.
    """
    # Not scikit-learn's ConfusionMatrixDisplay: it cannot print counts and choose colours by fractions.
    figure, axes = _figure(size=max(4.5, min(14.0, 2 + 0.45 * len(classes))))
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the class")
    groups = f", {together:,} classes in each row and column" if together > 1 else ""
    axes.set(xlabel=f"answered{groups}", ylabel="true")
    if len(classes) <= 4 * _MOST_NUMBERS:
        names = [name if len(name) <= 16 else f"{name[:15]}…" for name in classes]
        turned = 90 if max(map(len, names)) > 3 else 0
        axes.set_xticks(range(len(names)), names, rotation=turned)
        axes.set_yticks(range(len(names)), names)
    if len(classes) <= _MOST_NUMBERS:
        for row, column in np.argwhere(counts):
            colour = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=colour, fontsize=8)
    save_picture(figure, path, dpi=120)


def plot_numbers(path: Path, targets: np.ndarray, predicted: np.ndarray) -> None:
    """Plot predicted numbers against their targets to a PNG file; correct predictions are on the diagonal.

    Args:
        path: The file.
        targets: The targets [N].
        predicted: The predictions [N].
    """
    figure, axes = _figure(size=5.0)
    axes.scatter(targets, predicted, s=8, alpha=0.5, color="#1d4ed8", linewidths=0)
    low, high = min(targets.min(), predicted.min()), max(targets.max(), predicted.max())
    axes.plot([low, high], [low, high], color="#666666", linestyle=":", linewidth=1)
    axes.set(xlabel="true", ylabel="answered")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, dpi=120)


def _figure(size: float):  # noqa: ANN202 - the types are those of an optional module
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra.for_package("matplotlib", "plotting predictions", "train") from None
    figure = Figure(figsize=(size, size), layout="constrained")
    return figure, figure.subplots()

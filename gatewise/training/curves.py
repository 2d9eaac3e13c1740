"""The plot of a run's learning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gatewise.contract.errors import MissingExtra
from gatewise.training.history import PERPLEXITY, Evaluation, Measure
from gatewise.training.pictures import save_picture

_FEW_DECADES, _MANY_DECADES = 0.6, 3.0
"""The ranges of an axis, in powers of ten, below which its ticks are equidistant, and from which they are powers."""
_PLAIN = (1e-6, 1e9)
"""The range of numbers that are written without an exponent."""


def plain_number(value: float) -> str:
    """Return a number as the label of a tick: with separators of thousands, without an exponent or trailing zeros."""
    if value and not _PLAIN[0] <= abs(value) < _PLAIN[1]:
        return f"{value:g}"
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def check_plots() -> None:
    """Check that plots can be drawn, before a training that ends with one.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtra.for_package("matplotlib", "plotting the curves", "train") from None
    del Figure


def plot_curves(
    path: Path,
    history: Sequence[Evaluation],
    unit: str,
    floor: float | None = None,
    measure: Measure = PERPLEXITY,
) -> None:
    """Plot losses, the score if there is one, and speed by epoch to a PNG file.

    Args:
        path: The file.
        history: The evaluations, at least one.
        unit: The unit of tokens, in the plural.
        floor: The perplexity of a unigram model, drawn as a dotted line for comparison.
        measure: The format of losses.
    """
    check_plots()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    panels = 3 if measure.score else 2
    figure = Figure(figsize=(4.5 * panels, 4), layout="constrained")
    left, *middle, right = figure.subplots(1, panels)
    epochs = [evaluation.epoch for evaluation in history]
    dots = {"marker": "o", "markersize": 3}
    left.plot(epochs, [measure.of(each.train_loss) for each in history], color="#8aa6c1", label="train", **dots)
    left.plot(epochs, [measure.of(each.valid_loss) for each in history], color="#c2410c", label="valid", **dots)
    best = min(history, key=lambda each: each.valid_loss)
    left.annotate(
        f"{measure.of(best.valid_loss):.{measure.digits - 1}f}",
        (best.epoch, measure.of(best.valid_loss)),
        textcoords="offset points",
        xytext=(0, -14),
        ha="center",
        color="#c2410c",
    )
    if floor is not None:
        left.axhline(floor, color="#666666", linestyle=":", linewidth=1, label="unigram model")
    left.set(title=measure.name, xlabel="epoch", yscale="log")
    left.margins(y=0.12)  # space for the number below the best epoch
    low, high = left.get_ylim()
    decades = math.log10(high / low)
    few, many = (1.0, 2.0, 5.0), (1.0,)
    left.yaxis.set_major_locator(
        MaxNLocator(6) if decades < _FEW_DECADES else LogLocator(subs=few if decades < _MANY_DECADES else many)
    )
    left.yaxis.set_minor_locator(NullLocator())
    left.legend(frameon=False)
    for axes in middle:
        axes.plot(epochs, [each.scores[measure.score] for each in history], color="#c2410c", **dots)
        axes.set(title=f"{measure.score}, valid", xlabel="epoch")
    right.plot(epochs, [each.tokens_per_second for each in history], color="#15803d", **dots)
    right.set(title=f"training speed ({unit}/s)", xlabel="epoch")
    right.set_ylim(0, 1.1 * right.get_ylim()[1])
    for axes in (left, *middle, right):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=epochs[-1] >= 1, min_n_ticks=1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, dpi=120)

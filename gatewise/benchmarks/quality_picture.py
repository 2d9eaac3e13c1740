"""The plot of time to quality: the validation score of each run over the minutes of its training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gatewise.benchmarks.drawing import INK, inked, save
from gatewise.benchmarks.quality import HEADINGS, SCORES, QualityRecord

_COLOURS = ("#2f81f7", "#d9730d", "#12956b", "#a05fd0", "#c2477f", "#b8860b")
_LINES = ("-", "--", ":")
_HEADROOM = 2.0
"""Perplexities are drawn up to this multiple of the lowest: those of the first epochs would flatten all curves."""


def draw(records: Sequence[QualityRecord], prefix: Path) -> list[Path]:
    """Plot the validation scores over time as PNG and as SVG, a panel for each task and a line for each run.

    Lines of a second device, and of further ones, are dashed or dotted.

    Args:
        records: The records, at least one.
        prefix: The file name without suffix.

    Returns:
        The files.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    tasks = list(dict.fromkeys(each.task for each in records))
    recipes = list(dict.fromkeys(each.recipe for each in records))
    devices = list(dict.fromkeys(each.run.device for each in records))
    with inked():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6 * len(tasks), 3.2), layout="constrained")
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            key, named, lowest = f"valid_{SCORES[task]}", set(), []
            for each in records:
                if each.task != task:
                    continue
                scores = [line[key] for line in each.evaluations]
                colour = _COLOURS[recipes.index(each.recipe) % len(_COLOURS)]
                name = f"{each.recipe}, {each.run.device}" if len(devices) > 1 else each.recipe
                axes.plot(
                    [line["minutes"] for line in each.evaluations],
                    scores,
                    color=colour,
                    label=None if name in named else name,
                    linestyle=_LINES[devices.index(each.run.device) % len(_LINES)],
                    linewidth=1.2,
                )
                named.add(name)
                lowest.append(min(scores))
            if SCORES[task] == "perplexity":
                axes.set_ylim(0.97 * min(lowest), _HEADROOM * max(lowest))
            axes.set_xlim(0)
            axes.set_xlabel("minutes", fontsize="small")
            axes.set_title(f"{HEADINGS[SCORES[task]]} on validation data", fontsize="small")
            axes.grid(color=INK, alpha=0.25, linewidth=0.6)
            axes.tick_params(axis="both", length=0, labelsize="x-small")
            axes.spines[:].set_visible(False)
            axes.legend(frameon=False, fontsize="x-small")
        figure.suptitle(", ".join(devices), fontsize="medium")
        return save(figure, prefix)

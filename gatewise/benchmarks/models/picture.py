"""The plot of the benchmark: the time of each model's step before and after, and the part of the recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gatewise.benchmarks.drawing import INK, inked, save
from gatewise.benchmarks.models.record import LAYERS, STEP, TRAIN, ModelRecord
from gatewise.benchmarks.models.ways import ACCELERATED, BEFORE
from gatewise.contract.errors import ArgumentError, sentence

_COLOURS = {BEFORE: ("#8b949e", "#57606a"), ACCELERATED: ("#9ecbff", "#2f81f7")}
_OTHER = ("#9be9c8", "#12956b")
_HEIGHT = 0.27


def draw(records: Sequence[ModelRecord], prefix: Path) -> list[Path]:
    """Plot the time of training steps relative to that before, as PNG and as SVG.

    Args:
        records: The records of one device.
        prefix: The file name without suffix.

    Returns:
        The files.

    Raises:
        MissingExtra: matplotlib is not installed.
        ArgumentError: No training step was measured before and after.
    """
    rows = drawable(records)
    if not rows:
        raise ArgumentError(sentence("--plot", "drawn from at least one measured row", "none"))
    with inked():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 1.2 + 0.75 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for place, record in enumerate(rows):
            before = record.ways[BEFORE].median(STEP) or 1.0
            for number, (name, way) in enumerate(record.ways.items()):
                step, layers = way.median(STEP), way.median(LAYERS)
                if not step or not layers:
                    continue
                at = place + (number - (len(record.ways) - 1) / 2) * _HEIGHT
                light, dark = _COLOURS.get(name, _OTHER)
                axes.barh(at, step / before, 0.9 * _HEIGHT, color=light)
                axes.barh(at, min(layers, step) / before, 0.9 * _HEIGHT, color=dark)
                factor = "" if name == BEFORE else f", {before / step:.1f}x"
                axes.text(step / before, at, f" {1e3 * step:.3g} ms{factor}", va="center", fontsize="xx-small")
        for name, (_, dark) in {**_COLOURS, "reverse=, resets=": _OTHER}.items():
            axes.barh(0, 0, color=dark, label=name)
        axes.set_yticks(range(len(rows)), [row.case for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 1.25)
        axes.set_xlabel("time of a training step, relative to before; dark: the LSTM layers", fontsize="small")
        axes.grid(axis="x", color=INK, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(axis="both", length=0, labelsize="small")
        axes.spines[:].set_visible(False)
        figure.legend(fontsize="x-small", loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(f"Whole training steps on one {rows[0].run.device}", fontsize="medium")
        return save(figure, prefix)


def drawable(records: Sequence[ModelRecord]) -> list[ModelRecord]:
    """Return the records that `draw` would plot."""
    return [row for row in records if row.direction == TRAIN and row.speed_up(ACCELERATED, STEP)]

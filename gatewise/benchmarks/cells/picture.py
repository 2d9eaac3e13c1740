"""The plot of the benchmark: for each cell, how many times as fast it is as what PyTorch offers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gatewise.benchmarks.cells.record import CELL, LIBRARY, LOOP, STEP, CellRecord
from gatewise.benchmarks.cells.report import speed_up
from gatewise.benchmarks.drawing import INK, inked, save
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, TRAIN
from gatewise.contract.errors import ArgumentError, sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = {LIBRARY: ("nn.LSTM", "#8b949e"), STEP: ("a loop, its step compiled", "#d9730d"), LOOP: ("a loop", "#2f81f7")}
_TITLES = {EAGER: "eager", GRAPH: "under a CUDA graph"}


def draw(records: Sequence[CellRecord], prefix: Path, direction: str = TRAIN) -> list[Path]:
    """Plot the speed-ups of every cell as bars, geometric means over the cases, as PNG and as SVG.

    Args:
        records: The records of one device; those of the precision that was measured first are drawn.
        prefix: The file name without suffix.
        direction: "train" or "inference".

    Returns:
        The files.

    Raises:
        MissingExtra: matplotlib is not installed.
        ArgumentError: No record of this direction has a speed-up.
    """
    rows = drawable(records, direction)
    if not rows:
        raise ArgumentError(sentence("--plot", f"drawn from at least one measured row ({direction})", "none"))
    by_cell = {cell: [row for row in rows if row.cell == cell] for cell in dict.fromkeys(row.cell for row in rows)}
    panels = [how for how in (EAGER, GRAPH) if any(row.ratio(way, how) for row in rows for way in _BARS)]
    measured = [way for way in _BARS if any(row.ratio(way, how) for row in rows for how in panels)]
    with inked():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6 * len(panels), 1.4 + 0.42 * len(by_cell)), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for one, how in zip(axes, panels, strict=True):
            _panel(one, by_cell, how, measured)
        axes[0].set_yticks(range(len(by_cell)), [name.replace("_", " ") for name in by_cell])
        axes[0].set_ylim(len(by_cell) - 0.4, -0.6)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize="x-small", loc="outside lower center", ncols=3, frameon=False)
        what = "Training step" if direction == TRAIN else "Inference"
        title = f"{what} of one layer in {rows[0].dtype}: times as fast as plain PyTorch on one {rows[0].run.device}"
        figure.suptitle(title, fontsize="medium")
        return save(figure, prefix)


def drawable(records: Sequence[CellRecord], direction: str = TRAIN) -> list[CellRecord]:
    """Return the records that `draw` would plot."""
    rows = [row for row in records if row.direction == direction and row.median(CELL, EAGER)]
    rows = [row for row in rows if any(row.ratio(way, EAGER) for way in _BARS)]
    return [row for row in rows if row.dtype == rows[0].dtype]


def _panel(axes: Axes, by_cell: dict[str, list[CellRecord]], how: str, ways: Sequence[str]) -> None:
    height = 0.8 / len(ways)
    for place, way in enumerate(ways):
        name, colour = _BARS[way]
        for number, rows in enumerate(by_cell.values()):
            factor = speed_up(rows, way, how)
            if not factor:
                continue
            at = number + height * (place - (len(ways) - 1) / 2)
            axes.barh(at, factor - 1, height, left=1, color=colour)
            axes.text(max(factor, 1), at, f" {factor:.3g}", va="center", fontsize="xx-small")
        axes.barh(0, 0, left=1, color=colour, label=f"as {name}")  # an entry of the legend, in every panel
    axes.set_xscale("log")
    axes.axvline(1, color=INK, linewidth=1.0)
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.grid(axis="x", color=INK, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", which="both", length=0, labelsize="small")
    axes.spines[:].set_visible(False)
    axes.set_title(_TITLES[how], fontsize="small")

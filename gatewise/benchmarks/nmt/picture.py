"""The plot of the translation benchmark: memory by part, and throughput by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gatewise.benchmarks.drawing import INK, inked, save
from gatewise.benchmarks.nmt.parts import ATTENTION, BACKWARD, LSTM, OTHER, OUTPUT, PARTS, WEIGHTS
from gatewise.benchmarks.nmt.record import EAGER, GRAPH, TranslationRecord
from gatewise.contract.errors import ArgumentError, sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import LegendLocType

# The plot must be readable on white and black pages: a transparent background and colours of medium lightness.
_COLOURS = {
    ATTENTION: "#d9730d",
    LSTM: "#2f81f7",
    OUTPUT: "#12956b",
    OTHER: "#a05fd0",
    BACKWARD: "#b8860b",
    WEIGHTS: "#8b949e",
}
_LINES = ("#6e7781", "#d9730d", "#2f81f7", "#12956b", "#a05fd0", "#c2477f", "#b8860b")
_MEMORY_PANELS = 2


def draw(records: Sequence[TranslationRecord], prefix: Path) -> list[Path]:
    """Plot memory by part for the first cases, and samples per second by batch size, as PNG and as SVG.

    Args:
        records: The records of one device; those of the precision that was measured first are drawn.
        prefix: The file name without suffix.

    Returns:
        The files.

    Raises:
        MissingExtra: matplotlib is not installed.
        ArgumentError: No row has a speed.
    """
    rows = drawable(records)
    if not rows:
        raise ArgumentError(sentence("--plot", "drawn from at least one measured row", "none"))
    measured = [row for row in rows if row.parts and row.budget_bytes is None]
    cases = _shown_cases(measured)
    ways = list(dict.fromkeys(row.way for row in rows))
    with inked():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.4 * (len(cases) + 1), 1.6 + 0.32 * len(ways)), layout="constrained")
        *left, right = figure.subplots(1, len(cases) + 1, squeeze=False)[0]
        for place, (axes, case) in enumerate(zip(left, cases, strict=True)):
            _memory(axes, [row for row in measured if row.case == case], ways, named=place == 0)
        _throughput(right, rows, ways)
        # The legends are below all axes: below their own, a wide legend would move the axes apart.
        legends: list[tuple[Axes, LegendLocType, int]]
        legends = [(axes, "outside lower left", len(PARTS)) for axes in left[:1]]
        legends.append((right, "outside lower right", 3))
        for axes, place, columns in legends:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, fontsize="x-small", loc=place, ncols=columns, frameon=False)
        where = rows[-1].run.device
        figure.suptitle(
            f"Training a translation model with attention, {rows[0].dtype}, on one {where}", fontsize="medium"
        )
        return save(figure, prefix)


def drawable(records: Sequence[TranslationRecord]) -> list[TranslationRecord]:
    """Return the records that `draw` would plot."""
    rows = [record for record in records if record.fastest]
    return [row for row in rows if row.dtype == rows[0].dtype]


def _shown_cases(rows: Sequence[TranslationRecord]) -> list[str]:
    """Return the first case for each pair of lengths."""
    cases: dict[tuple[int, int], str] = {}
    for row in rows:
        cases.setdefault((row.settings["source"], row.settings["target"]), row.case)
    return list(cases.values())[:_MEMORY_PANELS]


def _memory(axes: Axes, rows: Sequence[TranslationRecord], ways: Sequence[str], *, named: bool) -> None:
    by_way = {row.way: row for row in rows}
    left = [0.0] * len(ways)
    for part in PARTS:
        sizes = [by_way[way].parts[part] / 1e9 if way in by_way else 0.0 for way in ways]
        axes.barh(range(len(ways)), sizes, 0.7, left=left, color=_COLOURS[part], label=part)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.2f}" if total else " -", va="center", fontsize="x-small")
    axes.set_xlim(0, 1.15 * max(left))
    axes.set_yticks(range(len(ways)), ways if named else [""] * len(ways))
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.set_xlabel("GB at the peak of a step", fontsize="small")
    axes.set_title(rows[0].case, fontsize="small")
    _plain_frame(axes, "x")


def _throughput(axes: Axes, rows: Sequence[TranslationRecord], ways: Sequence[str]) -> None:
    first = rows[0].settings
    sizes = [name for name in first if name not in ("name", "batch", "steps_a_sample")]
    alike = [row for row in rows if all(row.settings[name] == first[name] for name in sizes)]
    for way, colour in zip(ways, _LINES * len(ways), strict=False):
        own = [row for row in alike if row.way == way]
        if own and own[0].plain:
            points = _points(own, EAGER)
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=":", marker=".", label=f"{way}, launched")
            points = _points(own, GRAPH)
        else:
            points = sorted((row.batch, row.fastest or 0.0) for row in own)
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, linewidth=1.4, label=way)
    axes.set_ylim(0)
    axes.set_xlim(0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("sentence pairs a batch", fontsize="small")
    axes.set_title(f"samples/s, lengths {first['source']}/{first['target']}, as a CUDA graph", fontsize="small")
    _plain_frame(axes, "both")


def _points(rows: Sequence[TranslationRecord], how: str) -> list[tuple[int, float]]:
    return sorted((row.batch, rate) for row in rows if (rate := row.samples_per_second(how)))


def _plain_frame(axes: Axes, grid: str) -> None:
    axes.grid(axis=grid, color=INK, alpha=0.25, linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", length=0, labelsize="x-small")
    axes.spines[:].set_visible(False)

"""The plot of the benchmark: how many times as fast several processes are as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gatewise.benchmarks.drawing import INK, inked, save
from gatewise.benchmarks.record import Record
from gatewise.benchmarks.scale.report import Sizes, rows, speed_up
from gatewise.contract.errors import ArgumentError, sentence

_COLOURS = ("#8b949e", "#d9730d", "#2f81f7", "#12956b", "#a05fd0", "#c2477f", "#b8860b", "#4f6d7a")


def draw(records: Sequence[Record], prefix: Path) -> list[Path]:
    """Plot the speed over that of one process by the number of processes, as PNG and as SVG.

    Args:
        records: The records of one device.
        prefix: The file name without suffix.

    Returns:
        The files.

    Raises:
        MissingExtra: matplotlib is not installed.
        ArgumentError: No row was measured on one process and on several.
    """
    lines = drawable(records)
    if not lines:
        raise ArgumentError(sentence("--plot", "drawn from a row with one process and several", "none"))
    tables = list(dict.fromkeys(sizes for sizes, _ in lines))
    ways = list(dict.fromkeys(way for _, way in lines))
    first = {way: next(sizes for sizes, name in lines if name == way) for way in ways}
    most = max(count for points in lines.values() for count in points)
    with inked():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.6 * len(tables), 3.6), layout="constrained")
        for axes, sizes in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
            axes.plot([1, most], [1, most], color=INK, linewidth=0.8, linestyle="--")
            for way, colour in zip(ways, _COLOURS * len(ways), strict=False):
                if points := lines.get((sizes, way)):
                    label = way if sizes == first[way] else None
                    axes.plot([*points], [*points.values()], color=colour, marker="o", markersize=3, label=label)
            axes.set_title(sizes.title.replace("), ", "),\n"), fontsize="small")
            axes.set_xlabel("processes", fontsize="small")
            axes.set_ylabel("times as fast as one", fontsize="small")
            axes.set_xticks(sorted({count for points in lines.values() for count in points}))
            axes.tick_params(axis="both", length=0, labelsize="small")
            axes.grid(color=INK, alpha=0.25, linewidth=0.6)
            axes.spines[:].set_visible(False)
        figure.legend(fontsize="x-small", loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(f"Training steps on {records[0].run.device}", fontsize="medium")
        return save(figure, prefix)


def drawable(records: Sequence[Record]) -> dict[tuple[Sizes, str], dict[int, float]]:
    """Return speeds over that of one process by sizes and way, of the rows that `draw` would plot."""
    found = {}
    for key, row in rows(records).items():
        points = {count: speed_up(row, count) for count in sorted(row)}
        if len(measured := {count: factor for count, factor in points.items() if factor}) > 1:
            found[key] = measured
    return found

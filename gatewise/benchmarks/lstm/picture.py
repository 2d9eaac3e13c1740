"""The plot of the benchmark: speed-ups over PyTorch's layer by case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gatewise.benchmarks.drawing import INK, inked, save
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, TRAIN, LayerRecord
from gatewise.benchmarks.lstm.report import geometric_mean
from gatewise.contract.errors import ArgumentError, sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The plot must be readable on white and black pages: a transparent background and colours of medium lightness.
_COLOURS = {"bf16": "#2f81f7", "fp16": "#12956b", "tf32": "#d9730d", "fp32": "#a05fd0"}
_MARKERS = {"bf16": "o", "fp16": "s", "tf32": "D", "fp32": "^"}
_TITLES = {EAGER: "eager", GRAPH: "both under a CUDA graph"}


def draw(records: Sequence[LayerRecord], prefix: Path, direction: str = TRAIN) -> list[Path]:
    """Plot the speed-ups over PyTorch's layer of every case, with a mark for each precision, as PNG and as SVG.

    Args:
        records: The records of one device; those that were measured in the given direction are drawn, and of these, if
            there are several kernels, only those of "auto".
        prefix: The file name without suffix.
        direction: "train" or "inference".

    Returns:
        The files.

    Raises:
        MissingExtra: matplotlib is not installed.
        ArgumentError: No record of this direction has a speed.
    """
    rows = drawable(records, direction)
    if not rows:
        raise ArgumentError(sentence("--plot", f"drawn from at least one measured row ({direction})", "none"))
    cases = list(dict.fromkeys(record.case for record in rows))
    panels = [how for how in (EAGER, GRAPH) if any(record.speed_up(how) for record in rows)]
    with inked():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6 * len(panels), 1.5 + 0.2 * len(cases)), layout="constrained")
        axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for one, how in zip(axes, panels, strict=True):
            _panel(one, rows, cases, how)
        factors = [factor for record in rows for how in panels if (factor := record.speed_up(how))]
        axes[0].set_xlim(min(0.8, 0.9 * min(factors)), max(2.2, 1.15 * max(factors)))
        axes[0].set_yticks(range(len(cases)), [name.replace("_", " ") for name in cases])
        axes[0].set_ylabel("task, or time steps-batch-hidden units", fontsize="small")
        axes[0].set_ylim(len(cases) - 0.4, -0.6)
        what = "Training step" if direction == TRAIN else "Inference"
        figure.suptitle(
            f"{what}: times as fast as torch.{rows[-1].rival} on one {rows[-1].run.device}", fontsize="medium"
        )
        return save(figure, prefix)


def drawable(records: Sequence[LayerRecord], direction: str = TRAIN) -> list[LayerRecord]:
    """Return the records that `draw` would plot."""
    rows = [record for record in records if record.direction == direction and record.speed_up(EAGER)]
    return [record for record in rows if record.kernel == "auto"] or rows


def _panel(axes: Axes, rows: Sequence[LayerRecord], cases: Sequence[str], how: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    for dtype in dict.fromkeys(record.dtype for record in rows):
        found = [(record.speed_up(how), cases.index(record.case)) for record in rows if record.dtype == dtype]
        found = [(factor, place) for factor, place in found if factor]
        if not found:
            continue
        axes.scatter(
            *zip(*found, strict=True),
            s=22,
            color=_COLOURS.get(dtype, INK),
            marker=_MARKERS.get(dtype, "o"),
            linewidths=0,
            alpha=0.9,
            label=f"{dtype}, mean {geometric_mean(factor for factor, _ in found):.1f}x",
            zorder=3,
        )
    axes.set_xscale("log")
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 3, 5, 10, 20, 40]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.grid(axis="x", color=INK, alpha=0.25, linewidth=0.6)
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    axes.tick_params(axis="both", length=0, labelsize="small")
    axes.spines[:].set_visible(False)
    axes.set_title(_TITLES[how], fontsize="small")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=2, frameon=False)

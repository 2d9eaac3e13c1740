"""The plot of the benchmark: speed-ups over PyTorch's layer by case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewise.benchmarks.drawing import INK, inked, save
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, TRAIN, LayerRecord
from gatewise.benchmarks.lstm.report import geometric_mean
from gatewise.contract.errors import ArgumentError, sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The plot must be readable on white and black pages: a transparent background and colours of medium lightness.
_BARS = {EAGER: ("eager", "#9ec1f0", 0.72), GRAPH: ("both under a CUDA graph", "#1f6feb", 0.36)}
"""The label, the colour and the height of the bars of both kinds of launch; the bars of a case overlap."""
_TICKS = (0.25, 0.5, 1, 2, 3, 5, 10, 20, 40)


def draw(records: Sequence[LayerRecord], prefix: Path, direction: str = TRAIN) -> list[Path]:
    """Plot the speed-up over PyTorch's layer for every case as PNG and as SVG: means over the precisions.

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
    cases = by_size(rows)
    with inked():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.0, 1.6 + 0.23 * len(cases)), layout="constrained")
        axes = figure.subplots()
        _bars(axes, cases)
        axes.set_yticks(range(len(cases)), [label(measured[0].settings) for measured in cases])
        axes.set_ylim(len(cases) - 0.4, -0.6)
        what = "Training step" if direction == TRAIN else "Inference"
        precisions = ", ".join(dict.fromkeys(record.dtype for record in rows))
        title = f"{what}: times as fast as torch.{rows[-1].rival} on one {rows[-1].run.device}"
        figure.suptitle(f"{title}\ngeometric means over {precisions}", fontsize="medium")
        return save(figure, prefix)


def drawable(records: Sequence[LayerRecord], direction: str = TRAIN) -> list[LayerRecord]:
    """Return the records that `draw` would plot."""
    rows = [record for record in records if record.direction == direction and record.speed_up(EAGER)]
    return [record for record in rows if record.kernel == "auto"] or rows


def by_size(rows: Sequence[LayerRecord]) -> list[list[LayerRecord]]:
    """Return the records of each case, the cases ordered by hidden units, layers, batch and time steps."""

    def size(measured: list[LayerRecord]) -> tuple[int, ...]:
        settings = measured[0].settings
        layers = settings["num_layers"] * settings["directions"]
        return settings["hidden_size"], layers, settings["batch"], settings["time"]

    names = dict.fromkeys(record.case for record in rows)
    return sorted(([record for record in rows if record.case == name] for name in names), key=size)


def label(settings: dict[str, Any]) -> str:
    """Return the sizes of a case in words, after its name if it has one."""
    units = f"{settings['hidden_size']} units"
    layers = f" x {settings['num_layers']} layers" if settings["num_layers"] > 1 else ""
    both = ", bidirectional" if settings["directions"] > 1 else ""
    batch, time = f"batch {settings['batch']}", f"{settings['time']} step{'' if settings['time'] == 1 else 's'}"
    ragged = " at most" if settings["ragged"] else ""
    name = settings["name"].removesuffix("_ragged")
    known = "" if name[0].isdigit() or name.startswith("decode") else f"{name.replace('_', ' ')}: "
    return f"{known}{units}{layers}{both}, {batch}, {time}{ragged}"


def _bars(axes: Axes, cases: Sequence[Sequence[LayerRecord]]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    furthest = [1.0] * len(cases)
    for how, (name, colour, height) in _BARS.items():
        means = [_mean(measured, how) for measured in cases]
        drawn = [(place, mean) for place, mean in enumerate(means) if mean is not None]
        if not drawn:
            continue
        places, factors = zip(*drawn, strict=True)
        axes.barh(
            places,
            [factor - 1 for factor in factors],
            left=1,
            height=height,
            color=colour,
            label=f"{name}, mean {geometric_mean(factors):.1f}x",
            zorder=3,
        )
        for place, factor in drawn:
            furthest[place] = max(furthest[place], factor)
    for place, measured in enumerate(cases):
        texts = [f"{mean:.1f}" for how in _BARS if (mean := _mean(measured, how)) is not None]
        axes.annotate(
            " / ".join(texts),
            (furthest[place], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize="x-small",
        )
    axes.set_xscale("log")
    least = min(mean for measured in cases for how in _BARS if (mean := _mean(measured, how)) is not None)
    axes.set_xlim(min(0.9, 0.95 * least), max(2.2, 1.5 * max(furthest)))
    axes.axvline(1, color=INK, linewidth=1.2, zorder=4)
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.grid(axis="x", color=INK, alpha=0.25, linewidth=0.6)
    axes.tick_params(axis="both", length=0, labelsize="small")
    axes.spines[:].set_visible(False)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.3, -0.04), ncols=2, frameon=False)


def _mean(measured: Sequence[LayerRecord], how: str) -> float | None:
    factors = [factor for record in measured if (factor := record.speed_up(how))]
    return geometric_mean(factors) if factors else None

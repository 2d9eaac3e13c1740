"""Reports of the benchmark: a table for the terminal, a summary for pages, and all values in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gatewise.benchmarks.lstm.report import plain_table
from gatewise.benchmarks.models.record import GRAPH, LAYERS, STEP, TRAIN, Measurement, ModelRecord
from gatewise.benchmarks.models.ways import ACCELERATED, BEFORE
from gatewise.benchmarks.provenance import commands, provenance
from gatewise.benchmarks.record import MEASURED
from gatewise.contract.decision import format_bytes

_LEGEND = (
    "Before: the program as it is written, with `torch.nn.LSTM`. One line: the same after "
    "`gatewise.accelerate(model)`. reverse=, resets=: with these arguments of `gatewise.LSTM`, in place of two flips "
    "or of a loop over the steps. A step is forward, loss, backward, clipping and the program's optimizer, launched "
    "one by one; CUDA graph is the same replayed, with a fused optimizer. LSTM is the time of the recurrent layers' "
    "calls of a step, made again alone, forward and backward; its share is relative to the step, and above 100 % where "
    "the calls take longer alone than a step does. In brackets: times as fast as before. Loss: the distance from the "
    "loss curve before, where 1 is how far three seeds are apart; in inference the error of the output, where 1 is "
    "twice the error before. Models are float32 with PyTorch's defaults, which is TF32 in recurrent layers, unless the "
    "table says otherwise."
)
_COLUMNS = ("model", "way", "step, ms", "LSTM, ms", "LSTM's share", "CUDA graph, ms", "loss", "memory", "kernel")


def on_screen(records: Sequence[ModelRecord]) -> RenderableType:
    """Return a table of all models for a terminal of 80 columns, and what was not measured."""
    if not records:
        return Text("No row was finished.")
    columns = ("model", "way", "step ms", "LSTM ms", "share", "LSTM", "step", "graph", "loss")
    table = plain_table("whole steps", columns, left=("model", "way"))
    for record in records:
        for name, way in record.ways.items():
            style = "" if way.status == MEASURED else "bold red"
            head = _model(record) if name == BEFORE else ""
            table.add_row(head, name, *_figures(record, name, way), style=style)
    notes = [Text(line) for line in _notes(records)]
    return Group(table, Text(""), *notes, Text(provenance([record.run for record in records]), style="dim"))


def markdown(records: Sequence[ModelRecord]) -> str:
    """Return the summary for a page: a table of all models and ways."""
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|---|---|{'---:|' * (len(_COLUMNS) - 3)}---|"]
    for record in records:
        lines += [
            f"| {' | '.join([_titled(record) if name == BEFORE else '', name, *_cells(record, name, way)])} |"
            for name, way in record.ways.items()
        ]
    return "\n".join([*lines, "", *_targets(records), "", _LEGEND, "", provenance([row.run for row in records])])


def report(records: Sequence[ModelRecord]) -> str:
    """Return the complete report in Markdown: the summary, then the sizes of each model, and what was not measured."""
    parts = ["# `gatewise bench models`", "", markdown(records), "", "Made by", ""]
    parts += [commands([record.run for record in records]), "", "## Models", ""]
    for record in records:
        sizes = ", ".join(f"{name} {value}" for name, value in record.settings.items())
        parts.append(f"- {_model(record)}: {record.about}; {sizes}")
    parts += ["", "## Times", "", "Milliseconds, median (20 to 80 %), and the largest difference of a single loss.", ""]
    parts += ["| model | way | step | LSTM | CUDA graph | calls of layers | largest |", f"|---|---|{'---:|' * 5}"]
    for record in records:
        for name, way in record.ways.items():
            spreads = [_spread(way, what) for what in (STEP, LAYERS, GRAPH)]
            largest = "" if way.largest is None else f"{way.largest:.1e}"
            parts.append(f"| {' | '.join([_model(record), name, *spreads, str(way.calls), largest])} |")
    parts += ["", *(f"- {line}" for line in _notes(records))]
    return "\n".join(parts).rstrip() + "\n"


def _figures(record: ModelRecord, name: str, way: Measurement) -> list[str]:
    if way.status != MEASURED:
        return [way.status, *[""] * 6]
    factors = [record.speed_up(name, what) if name != BEFORE else None for what in (LAYERS, STEP)]
    return [
        *(_milliseconds(way.median(what)) for what in (STEP, LAYERS)),
        _share(way),
        *("" if factor is None else f"{factor:.2f}x" for factor in factors),
        _milliseconds(way.median(GRAPH)),
        "" if way.worst is None else f"{way.worst:.2f}",
    ]


def _cells(record: ModelRecord, name: str, way: Measurement) -> list[str]:
    if way.status != MEASURED:
        return [way.status, *[""] * (len(_COLUMNS) - 3)]

    def timed(what: str) -> str:
        factor = None if name == BEFORE else record.speed_up(name, what)
        return _milliseconds(way.median(what)) + ("" if factor is None else f" ({factor:.1f}x)")

    return [
        timed(STEP),
        timed(LAYERS),
        _share(way),
        timed(GRAPH),
        "" if way.worst is None else f"{way.worst:.2f}",
        "" if way.peak_bytes is None else format_bytes(way.peak_bytes),
        ", ".join(way.kernels),
    ]


def _targets(records: Sequence[ModelRecord]) -> Iterator[str]:
    """Yield a sentence with the speed-ups of one line in training, from the least to the most."""
    found = [record for record in records if record.direction == TRAIN and record.speed_up(ACCELERATED, STEP)]
    if not found:
        return
    parts = []
    for what, words in ((LAYERS, "the LSTM layers"), (STEP, "the whole step")):
        factors = sorted((record.speed_up(ACCELERATED, what) or 0.0, record.case) for record in found)
        (least, worst), (most, best) = factors[0], factors[-1]
        parts.append(f"{words} {least:.1f} ({worst}) to {most:.1f} times ({best})")
    yield f"In training, one line makes {' and '.join(parts)} as fast."


def _notes(records: Sequence[ModelRecord]) -> list[str]:
    """Return a line for each reason why something was not measured, with the rows that it concerns."""
    found: dict[str, list[str]] = {}
    for record in records:
        for name, way in record.ways.items():
            if way.note:
                reason = way.note if way.status == MEASURED else f"{way.status}: {way.note}"
                found.setdefault(reason, []).append(f"{_model(record)} {name}")
    return [f"{reason} ({'; '.join(where)})" for reason, where in found.items()]


def _model(record: ModelRecord) -> str:
    return record.case if record.direction == TRAIN else f"{record.case} {record.direction}"


def _titled(record: ModelRecord) -> str:
    precision = record.settings["precision"]
    return _model(record) if precision == "float32" else f"{_model(record)}, {precision}"


def _share(way: Measurement) -> str:
    return "" if way.share is None else f"{100 * way.share:.0f} %"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def _spread(way: Measurement, what: str) -> str:
    timing = way.times.get(what)
    return "" if timing is None else f"{1e3 * timing.median:.3g} ({1e3 * timing.q20:.3g}-{1e3 * timing.q80:.3g})"

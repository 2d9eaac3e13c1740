"""Reports of the benchmark: tables for the terminal, a summary for pages, and all rows in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gatewise.benchmarks.cells.record import (
    CELL,
    LIBRARY,
    LOOP,
    PLAIN,
    RESETS,
    STEP,
    WHOLE,
    WITH_MASKS,
    CellRecord,
    Measurement,
)
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, INFERENCE, TRAIN
from gatewise.benchmarks.lstm.report import geometric_mean, plain_table
from gatewise.benchmarks.provenance import commands, provenance
from gatewise.benchmarks.record import MEASURED
from gatewise.cells import LSTM
from gatewise.contract.decision import format_bytes

_HOW = {EAGER: "eager", GRAPH: "CUDA graph"}
_WHAT = {TRAIN: "train step", INFERENCE: "inference"}
_RIVALS = {LIBRARY: "nn.LSTM", LOOP: "loop", STEP: "compiled step", WHOLE: "compiled loop"}
_SHORT = {LIBRARY: "nn", LOOP: "loop", STEP: "step", WHOLE: "whole"}
_WAYS = (CELL, PLAIN, RESETS, *WITH_MASKS, LIBRARY, LOOP, STEP, WHOLE)
_LEGEND = (
    "LSTM: time over that of gatewise.LSTM. {names}: times as fast as they are; the loop is over the cell's step in "
    "plain PyTorch, and is compiled as a whole in the cases with 32 steps. resets: time with episodes that begin at 3 "
    "% of the steps over that without. memory, error: the loop is 1; memory beyond inputs, weights, outputs and "
    "gradients. All are geometric means over the cases; {fewer}."
)
_OF_MASKS = "Columns of dropout and zoneout: time of a training step that draws its masks, over that without."
_COARSE = 1.3

Key = tuple[str, str]
Figure = Callable[[CellRecord], float | None]


def tables(records: Sequence[CellRecord]) -> dict[Key, dict[str, list[CellRecord]]]:
    """Return the records by precision and direction, then by cell, in their order."""
    found: dict[Key, dict[str, list[CellRecord]]] = {}
    for record in records:
        found.setdefault((record.dtype, record.direction), {}).setdefault(record.cell, []).append(record)
    return found


def speed_up(rows: Sequence[CellRecord], way: str, how: str) -> float | None:
    """Return the geometric mean of the times of a way over those of the cells' layers, "eager" or "graph"."""
    return geometric_mean(row.ratio(way, how) for row in rows)


def over_plain(record: CellRecord, *hows: str) -> float | None:
    """Return the time of a cell over that of gatewise.LSTM; 1 for the LSTM.

    Args:
        record: The row.
        hows: "graph", "eager" or both; the first one that was measured counts.
    """
    if record.cell == LSTM.name:
        return 1.0 if any(record.median(CELL, how) for how in hows) else None
    theirs = next(filter(None, (record.ratio(PLAIN, how) for how in hows)), None)
    return 1 / theirs if theirs else None


def over_cell(record: CellRecord, way: str, *hows: str) -> float | None:
    """Return the time of a cell with resets, dropout or zoneout over that without.

    Args:
        record: The row.
        way: The way, such as `RESETS`.
        hows: "graph", "eager" or both; the first one that was measured counts.
    """
    return next(filter(None, (record.ratio(way, how) for how in hows)), None)


def memory_ratio(record: CellRecord) -> float | None:
    """Return the memory of a cell over that of the loop; None for a single step, which keeps almost nothing."""
    if record.settings["time"] == 1:
        return None
    ours, theirs = (record.ways[way].extra_bytes if way in record.ways else None for way in (CELL, LOOP))
    return None if ours is None or not theirs else ours / theirs


def error_ratio(record: CellRecord) -> float | None:
    """Return the largest error of a cell over that of the loop."""
    return record.ways[CELL].error_ratio if CELL in record.ways else None


def on_screen(records: Sequence[CellRecord]) -> RenderableType:
    """Return tables of means for each precision and direction, and what was not measured, in 80 columns."""
    if not records:
        return Text("No row was finished.")
    parts: list[RenderableType] = []
    rivals = _rivals(records)
    columns = ("cell", "n", "LSTM", *(_SHORT[way] for way in rivals), "resets", "memory", "error")
    for key, by_cell in tables(records).items():
        for how in (EAGER, GRAPH):
            if not any(row.median(CELL, how) for rows in by_cell.values() for row in rows) and how == GRAPH:
                continue
            table = plain_table(f"{_title(key)}, {_HOW[how]}", columns, left=("cell",))
            for cell, rows in by_cell.items():
                style = "" if all(row.status == MEASURED for row in rows) else "bold red"
                table.add_row(cell, *_figures(rows, [(way, how) for way in rivals], (how,), "*"), style=style)
            parts += [table, Text("")]
            if masks := _measured_of(WITH_MASKS, [row for rows in by_cell.values() for row in rows]):
                titled = plain_table(f"{key[0]}, {_HOW[how]}, over no masks", ("cell", "n", *masks), left=("cell",))
                for cell, rows in by_cell.items():
                    titled.add_row(cell, *_figures_of_masks(rows, masks, (how,), "*"))
                parts += [titled, Text("")]
    parts += [Text(line) for line in (*_shortfalls(records), *_missing(records))]
    if _measured_of(WITH_MASKS, records):
        parts += [Text(f"Over no masks: {_OF_MASKS[0].lower()}{_OF_MASKS[1:]}", style="dim")]
    legend = _LEGEND.format(
        names="nn (nn.LSTM), loop, step (its step compiled), whole (all of it compiled)",
        fewer="a star marks those over fewer cases than n",
    )
    parts += [
        Text(legend, style="dim"),
        Text(provenance([record.run for record in records], in_turn=False), style="dim"),
    ]
    return Group(*parts)


def markdown(records: Sequence[CellRecord]) -> str:
    """Return the summary for a page: a table of means for each precision and direction, with a row for each cell."""
    lines = []
    rivals, masks = _rivals(records), _measured_of(WITH_MASKS, records)
    both = [(way, how) for way in rivals for how in (EAGER, GRAPH)]
    pairs = [f"{_RIVALS[way]}, {how}" for way, how in both]
    for key, by_cell in tables(records).items():
        lines += [f"**{_title(key)}**", ""]
        lines += [f"| {' | '.join(['cell', 'cases', 'LSTM', *pairs, 'resets', 'memory', 'error'])} |"]
        lines += [f"|---|{'---:|' * (len(pairs) + 5)}"]
        lines += [f"| {cell} | {' | '.join(_figures(rows, both, (GRAPH, EAGER)))} |" for cell, rows in by_cell.items()]
        lines += [""]
    if masks:
        lines += ["**Dropout and zoneout in training steps**", ""]
        lines += [f"| precision | cell | cases | {' | '.join(masks)} |", f"|---|---|{'---:|' * (len(masks) + 1)}"]
        lines += [
            f"| {dtype} | {cell} | {' | '.join(_figures_of_masks(rows, masks, (GRAPH, EAGER)))} |"
            for (dtype, direction), by_cell in tables(records).items()
            for cell, rows in by_cell.items()
            if direction == TRAIN and _measured_of(WITH_MASKS, rows)
        ]
        lines += ["", f"{_OF_MASKS} In a CUDA graph where there is one.", ""]
    legend = _LEGEND.format(
        names=", ".join(_RIVALS.values()),
        fewer="in brackets their number where it is smaller. LSTM and resets are in a CUDA graph where there is one",
    )
    return "\n".join([*lines, legend, "", provenance([record.run for record in records], in_turn=False)])


def report(records: Sequence[CellRecord]) -> str:
    """Return the complete report in Markdown: the summary, then all rows with times, memory, errors and kernels."""
    made_by = commands([record.run for record in records])
    parts = ["# `gatewise bench cells`", "", markdown(records), "", "Made by", "", made_by, ""]
    ways = [way for way in _WAYS if any(way in record.ways for record in records)]
    for key, by_cell in tables(records).items():
        parts += [
            f"## {_title(key)}",
            "",
            "Microseconds a time step, eager / in a CUDA graph.",
            "",
            f"| cell | case | {' | '.join(ways)} | memory (loop) | error | kernel |",
            f"|---|---|{'---:|' * (len(ways) + 2)}---|",
        ]
        for cell, rows in by_cell.items():
            parts += [f"| {cell} | {row.case} | {' | '.join(_full_cells(row, ways))} |" for row in rows]
        rows = [row for each in by_cell.values() for row in each]
        parts += ["", *(f"- {line}" for line in (*_shortfalls(rows), *_missing(rows))), ""]
    return "\n".join(parts).rstrip() + "\n"


def _measured_of(ways: Sequence[str], records: Sequence[CellRecord]) -> list[str]:
    return [way for way in ways if any(way in record.ways for record in records)]


def _figures_of_masks(
    rows: Sequence[CellRecord], ways: Sequence[str], hows: tuple[str, ...], mark: str = " ({})"
) -> list[str]:
    """Return the number of cases, and the mean of the times with each of these ways over those without."""
    cases = sum(row.median(CELL, EAGER) is not None for row in rows)
    return [str(cases), *(_mean(rows, lambda row, way=way: over_cell(row, way, *hows), cases, mark) for way in ways)]


def _mean(rows: Sequence[CellRecord], of: Figure, cases: int, mark: str, unit: str = "") -> str:
    found = [value for row in rows if (value := of(row))]
    mean = geometric_mean(found)
    fewer = mark.format(len(found)) if len(found) != cases else ""
    return "" if mean is None else f"{_digits(mean)}{unit}{fewer}"


def _rivals(records: Sequence[CellRecord]) -> list[str]:
    return _measured_of(list(_RIVALS), records)


def _figures(
    rows: Sequence[CellRecord], pairs: Sequence[tuple[str, str]], hows: tuple[str, ...], mark: str = " ({})"
) -> list[str]:
    cases = sum(row.median(CELL, EAGER) is not None for row in rows)

    def figure(of: Figure, unit: str = "") -> str:
        return _mean(rows, of, cases, mark, unit)

    times = [figure(lambda row, way=way, how=how: row.ratio(way, how), "x") for way, how in pairs]
    plain, resets = figure(lambda row: over_plain(row, *hows)), figure(lambda row: over_cell(row, RESETS, *hows))
    return [str(cases), plain, *times, resets, figure(memory_ratio), figure(error_ratio)]


def _full_cells(record: CellRecord, ways: Sequence[str]) -> list[str]:
    measured = [_times(record, way) for way in ways]
    sizes = [record.ways[way].extra_bytes if way in record.ways else None for way in (CELL, LOOP)]
    memory = "" if sizes[0] is None else format_bytes(sizes[0])
    beside = "" if sizes[1] is None else f" ({format_bytes(sizes[1])})"
    own = record.ways.get(CELL, Measurement(""))
    error = "" if own.error_ratio is None else _digits(own.error_ratio)
    in_graph = f", in a graph {own.ran_captured}" if own.ran_captured not in ("", own.ran) else ""
    return [*measured, f"{memory}{beside}".strip(), error, f"{own.ran}{in_graph}"]


def _times(record: CellRecord, way: str) -> str:
    if way not in record.ways:
        return ""
    if record.ways[way].status != MEASURED:
        return record.ways[way].status
    medians = (record.median(way, how) for how in (EAGER, GRAPH))
    return " / ".join(f"{1e6 * seconds / record.settings['time']:.3g}" for seconds in medians if seconds)


def _shortfalls(records: Sequence[CellRecord]) -> list[str]:
    """Return a line about the rows that are slower than nn.LSTM, and one about those that are coarser than the loop."""
    slow, coarse = [], []
    for record in records:
        where = f"{record.cell} {record.case} {record.dtype} {record.direction}"
        factor = record.ratio(LIBRARY, GRAPH) or record.ratio(LIBRARY, EAGER)
        if factor and factor < 1:
            slow.append(f"{where} {factor:.2f}x")
        error = error_ratio(record)
        if error and error > _COARSE:
            coarse.append(f"{where} {error:.2f}x")
    lines = [f"Slower than nn.LSTM, in a CUDA graph where there is one: {', '.join(slow)}."] if slow else []
    return lines + ([f"Errors above {_COARSE} times the loop's: {', '.join(coarse)}."] if coarse else [])


def _missing(records: Sequence[CellRecord]) -> list[str]:
    """Return a line for each reason why ways have no time, or none in a CUDA graph, with the rows that it concerns."""
    found: dict[str, list[str]] = {}
    for record in records:
        for way, measured in record.ways.items():
            where = f"{record.cell} {record.case} {record.dtype} {record.direction}"
            if measured.status != MEASURED:
                found.setdefault(f"{way}: {measured.status}. {measured.note}", []).append(where)
            elif "No CUDA graph" in measured.note:
                note = measured.note[measured.note.index("No CUDA graph") :]
                found.setdefault(f"{way}: {note}", []).append(where)
    return [f"{reason} ({', '.join(where)})" for reason, where in found.items()]


def _title(key: Key) -> str:
    dtype, direction = key
    return f"{dtype}, {_WHAT[direction]}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"

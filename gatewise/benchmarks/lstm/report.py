"""Reports of the benchmark: tables for the terminal, a summary for pages, and all rows in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gatewise.benchmarks.lstm.record import EAGER, GRAPH, INFERENCE, OURS, TRAIN, LayerRecord
from gatewise.benchmarks.provenance import commands, provenance
from gatewise.benchmarks.record import MEASURED, REFUSED
from gatewise.contract.decision import format_bytes

_STYLES = {MEASURED: "", REFUSED: "dim"}  # every other status is red
_WHAT = {TRAIN: "train step", INFERENCE: "inference"}
_HOW = {EAGER: "eager", GRAPH: "CUDA graph"}
_COLUMNS = ("case", "us/step", "eager", "graph", "floor", "memory", "error", "kernel")
_FULL_COLUMNS = (
    "case",
    "gatewise, us/step: eager (20-80 %)",
    "graph (20-80 %)",
    "{rival}: eager",
    "graph",
    "speed-up: eager",
    "graph",
    "floor, us/step",
    "over floor",
    "memory ({rival})",
    "error over {rival}",
    "ran",
    "predicted, us/step",
)
_NO_GRAPH = "No CUDA graph"
_NOISE = 0.03
_LEGEND = (
    "us/step: microseconds a time step, under a CUDA graph where there is one. eager, graph: times as fast as {rival}. "
    "floor: times the floor. memory, error: {rival} is 1; memory beyond inputs, weights, outputs and gradients."
)

Key = tuple[str, str, str]


def tables(records: Sequence[LayerRecord]) -> dict[Key, list[LayerRecord]]:
    """Return the records by precision, direction and kernel, in their order."""
    found: dict[Key, list[LayerRecord]] = {}
    for record in records:
        found.setdefault((record.dtype, record.direction, record.kernel), []).append(record)
    return found


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values other than None; None if there are none."""
    there = [value for value in values if value]
    return statistics.geometric_mean(there) if there else None


def slower(records: Sequence[LayerRecord], how: str, below: float = 0.995) -> list[str]:
    """Return the cases in which gatewise is slower than PyTorch's layer, the slowest first: "50-256-1024 0.67x"."""
    found = [(factor, record.case) for record in records if (factor := record.speed_up(how))]
    return [f"{case} {factor:.2f}x" for factor, case in sorted(found) if factor < below]


def token_costs(records: Sequence[LayerRecord]) -> list[str]:
    """Return for each ragged case the time of a token relative to that of the full case of the same sizes."""
    by_case = {record.case: record for record in records}
    lines = []
    for record in records:
        full = by_case.get(record.settings["name"].removesuffix("_ragged"))
        if not record.settings["ragged"] or full is None or not record.seconds or not full.seconds:
            continue
        tokens = record.settings["tokens"] / full.settings["tokens"]
        cost = record.seconds / full.seconds
        lines.append(
            f"{record.case}: {tokens:.0%} of the tokens of {full.case} in {cost:.0%} of its time, "
            f"{cost / tokens:.2f}x a token."
        )
    return lines


def predictions(records: Sequence[LayerRecord]) -> str:
    """Return a sentence about the accuracy of predicted times and peak memory; empty if there are none."""
    found = [
        (record.predicted / seconds, record.case)
        for record in records
        if record.predicted and (seconds := record.median(EAGER))
    ]
    if not found:
        return ""
    near = sum(0.75 <= ratio <= 1.25 for ratio, _ in found)
    ratio, case = max(found, key=lambda pair: abs(math.log(pair[0])))
    time = f"time predicted within 25 % in {near} of {len(found)} cells, furthest {case} with {ratio:.2f}x of it"
    inside = [
        record.predicted_captured / seconds
        for record in records
        if record.predicted_captured and (seconds := record.median(GRAPH))
    ]
    if inside:
        near = sum(0.75 <= ratio <= 1.25 for ratio in inside)
        time += f"; in a CUDA graph in {near} of {len(inside)}"
    peaks = [
        (record.predicted_bytes / record.peak_bytes[OURS], record.case)
        for record in records
        if record.predicted_bytes and record.peak_bytes.get(OURS)
    ]
    if not peaks:
        return f"{time}."
    near = sum(0.9 <= ratio <= 1.1 for ratio, _ in peaks)
    ratio, case = max(peaks, key=lambda pair: abs(math.log(pair[0])))
    return f"{time}; peak memory within 10 % in {near}, furthest {case} with {ratio:.2f}x of it."


def missed_choices(records: Sequence[LayerRecord], tolerance: float = 1.05) -> list[str]:
    """Return the cases in which a named kernel is faster than the choice of "auto", if both were measured."""
    lines = []
    by_table = tables(records)
    for (dtype, direction, kernel), rows in by_table.items():
        for record in rows if kernel == "auto" else ():
            others = [
                (other.seconds, name)
                for (*of, name), among in by_table.items()
                for other in among
                if of == [dtype, direction] and name != "auto" and other.case == record.case and other.seconds
            ]
            if record.seconds and others and record.seconds > tolerance * min(others)[0]:
                seconds, name = min(others)
                factor = record.seconds / seconds
                lines.append(
                    f"{dtype}, {_WHAT[direction]}, {record.case}: {name} is {factor:.2f}x as fast as the choice."
                )
    return lines


def on_screen(records: Sequence[LayerRecord]) -> RenderableType:
    """Return a table for each precision, direction and kernel, and the summary, for a terminal of 80 columns."""
    parts: list[RenderableType] = []
    for key, rows in tables(records).items():
        table = plain_table(_title(key), _COLUMNS, left=("case", "kernel"))
        for record in rows:
            table.add_row(*_cells(record), style=_STYLES.get(record.status, "bold red"))
        parts.append(table)
        parts += [Text(line, style=_STYLES.get(status, "red")) for status, line in _notes(rows)]
        parts += [Text(line) for line in token_costs(rows)]
        parts.append(Text(""))
    if not records:
        return Text("No row was finished.")
    parts += [_means(records), *(Text(line) for line in _shortfalls(records) + missed_choices(records)), Text("")]
    parts += [
        Text(_LEGEND.format(rival=records[0].rival), style="dim"),
        Text(provenance([record.run for record in records]), style="dim"),
    ]
    return Group(*parts)


def markdown(records: Sequence[LayerRecord]) -> str:
    """Return the summary for a page: geometric means over the cases, one row per precision; the kernel is "auto"."""
    rows = [record for record in records if record.kernel == "auto"] or list(records)
    cases = len({record.case for record in rows})
    lines = [
        f"Times as fast as `torch.{rows[0].rival}`, geometric means over {cases} shapes "
        f"(`gatewise bench {rows[0].cell}`):",
        "",
        "| | train step, from Python | train step, CUDA graph | inference, from Python | inference, CUDA graph "
        "| memory of a train step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for dtype in dict.fromkeys(record.dtype for record in rows):
        cells = [
            _factor(_mean(rows, dtype, direction, lambda record, how=how: record.speed_up(how)), "x")
            for direction in (TRAIN, INFERENCE)
            for how in (EAGER, GRAPH)
        ]
        cells.append(_factor(_mean(rows, dtype, TRAIN, lambda record: record.memory_ratio), "x"))
        lines.append(f"| {dtype} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_range(rows), *_below_one(rows), provenance([record.run for record in records])])


def report(records: Sequence[LayerRecord]) -> str:
    """Return the complete report in Markdown: the summary, then all rows with times, memory, errors and decisions."""
    made_by = commands([record.run for record in records])
    rival = records[0].rival
    legend = _LEGEND.format(rival=rival)
    parts = [f"# `gatewise bench {records[0].cell}`", "", markdown(records), "", legend, "", "Made by", "", made_by, ""]
    for key, rows in tables(records).items():
        parts += [
            f"## {_title(key)}",
            "",
            f"| {' | '.join(_FULL_COLUMNS).format(rival=rival)} |",
            f"|---|{'---:|' * 10}---|---:|",
        ]
        parts += [f"| {' | '.join(_full_cells(record))} |" for record in rows]
        parts += ["", *(f"- {line}" for _, line in _notes(rows))]
        parts += [*(f"- {line}" for line in token_costs(rows)), f"- {predictions(rows)}".rstrip("- "), ""]
    return "\n".join(parts).rstrip() + "\n"


def _means(records: Sequence[LayerRecord]) -> Table:
    table = plain_table("geometric means", ("", "cells", *_COLUMNS[2:7]), left=("",))
    for key, rows in tables(records).items():
        measured = [record for record in rows if record.status == MEASURED]
        table.add_row(
            _title(key),
            str(len(measured)),
            _factor(geometric_mean(record.speed_up(EAGER) for record in measured), "x"),
            _factor(geometric_mean(record.speed_up(GRAPH) for record in measured), "x"),
            _factor(geometric_mean(record.over_floor for record in measured)),
            _factor(geometric_mean(record.memory_ratio for record in measured)),
            _factor(geometric_mean(record.error_ratio for record in measured)),
        )
    return table


def _shortfalls(records: Sequence[LayerRecord]) -> list[str]:
    lines = []
    for key, rows in tables(records).items():
        for how, name in _HOW.items():
            cases = slower(rows, how)
            if cases:
                lines.append(f"Below 1.00x, {_title(key)}, {name}: {', '.join(cases)}.")
        coarse = [f"{row.case} {row.error_ratio:.2f}x" for row in rows if row.error_ratio and row.error_ratio > 1.2]
        lines += [f"Errors above 1.20x of {records[0].rival}'s, {_title(key)}: {', '.join(coarse)}."] if coarse else []
        lines += [f"{_title(key)}: {line}" for line in [predictions(rows)] if line]
    return lines


def _range(records: Sequence[LayerRecord]) -> list[str]:
    """Return a line with the meaning of precisions and memory, and the smallest and the largest ratio of all rows."""
    ratios = [ratio for record in records for how in _HOW if (ratio := record.speed_up(how))]
    text = (
        "`tf32` is float32 with PyTorch's default settings, `fp32` has TF32 switched off. A train step is a forward "
        "and a backward pass, without an optimizer. Memory is the peak beyond inputs, weights, outputs and gradients, "
        f"as a share of that of `torch.{records[0].rival}`, whose weights cuDNN copies in every call in bf16."
    )
    if not ratios:
        return [text, ""]
    return [f"{text} Single shapes are {min(ratios):.2f} to {max(ratios):.1f} times as fast.", ""]


def _below_one(records: Sequence[LayerRecord]) -> list[str]:
    found = [
        f"{_title(key)}, {name}: {', '.join(cases)}"
        for key, rows in tables(records).items()
        for how, name in _HOW.items()
        if (cases := slower(rows, how, 1 - _NOISE))
    ]
    beyond = f"by more than the {_NOISE:.0%} that runs differ by"
    return [f"Slower than `torch.{records[0].rival}`, {beyond}: {'; '.join(found)}.", ""] if found else []


def _mean(
    records: Sequence[LayerRecord], dtype: str, direction: str, figure: Callable[[LayerRecord], float | None]
) -> float | None:
    return geometric_mean(
        figure(record) for record in records if (record.dtype, record.direction) == (dtype, direction)
    )


def plain_table(title: str, columns: Sequence[str], *, left: Sequence[str]) -> Table:
    """Return an empty table for the terminal, whose columns are right-aligned but for those in `left`."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge = table.show_edge = False
    table.collapse_padding = True
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def _title(key: Key) -> str:
    dtype, direction, kernel = key
    return f"{dtype}, {_WHAT[direction]}{'' if kernel == 'auto' else f', {kernel}'}"


def _cells(record: LayerRecord) -> list[str]:
    if record.status != MEASURED:
        return [record.case, record.status, *[""] * 5, record.ran]
    return [
        record.case,
        _microseconds(record, record.seconds),
        _factor(record.speed_up(EAGER), "x"),
        _factor(record.speed_up(GRAPH), "x"),
        _factor(record.over_floor),
        _factor(record.memory_ratio),
        _factor(record.error_ratio),
        record.ran_captured or record.ran,
    ]


def _full_cells(record: LayerRecord) -> list[str]:
    if record.status != MEASURED:
        return [record.case, record.status, *[""] * 9, record.ran, ""]
    floor = record.floor.seconds if record.floor else None
    memory = [format_bytes(count) for side in (OURS, record.rival) if (count := record.extra_bytes(side)) is not None]
    return [
        record.case,
        _spread(record, EAGER),
        _spread(record, GRAPH),
        _microseconds(record, record.median(EAGER, record.rival)),
        _microseconds(record, record.median(GRAPH, record.rival)),
        _factor(record.speed_up(EAGER), "x"),
        _factor(record.speed_up(GRAPH), "x"),
        _microseconds(record, floor),
        _factor(record.over_floor),
        f"{memory[0]} ({memory[1]})" if len(memory) == 2 else "",
        _factor(record.error_ratio),
        f"{record.ran}{f' ({record.algorithm})' if record.algorithm else ''}{_in_a_graph(record)}",
        _microseconds(record, record.predicted),
    ]


def _in_a_graph(record: LayerRecord) -> str:
    return f", in a graph {record.ran_captured}" if record.ran_captured not in ("", record.ran) else ""


def _spread(record: LayerRecord, how: str) -> str:
    timing = record.times.get(how, {}).get(OURS)
    if timing is None:
        return ""
    ends = "-".join(_microseconds(record, seconds) for seconds in (timing.q20, timing.q80))
    return f"{_microseconds(record, timing.median)} ({ends})"


def _notes(records: Sequence[LayerRecord]) -> list[tuple[str, str]]:
    """Return status and note of rows that were not measured completely; cases with the same note share a line."""
    cases: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.status != MEASURED:
            cases.setdefault((record.status, f"{record.status}. {record.note}"), []).append(record.case)
        elif _NO_GRAPH in record.note:
            reason = record.note[record.note.index(_NO_GRAPH) :]
            cases.setdefault((record.status, reason), []).append(record.case)
    return [(status, f"{', '.join(names)}: {note}") for (status, note), names in cases.items()]


def _microseconds(record: LayerRecord, seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds / record.settings['time']:.3g}"


def _factor(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"

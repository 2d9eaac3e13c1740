"""Reports of the benchmark: words a second by the number of processes, and the efficiency beside one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from gatewise.benchmarks.lstm.report import plain_table
from gatewise.benchmarks.provenance import commands, provenance
from gatewise.benchmarks.record import MEASURED, Record, of_device
from gatewise.benchmarks.scale.captions import CAPTIONS, NO_GRAPH, model_of
from gatewise.benchmarks.scale.training import TRAININGS


class Sizes(NamedTuple):
    """What all rows of a table have in common.

    Attributes:
        title: The case, its main sizes and the precision, for readers.
        model: The model, a key of `CAPTIONS`.
        settings: All settings but the number of processes and that of steps in a sample, which is not a part of the
            task, as JSON.
    """

    title: str
    model: str
    settings: str

    @classmethod
    def of(cls, record: Record) -> Sizes:
        """Return the sizes of a record."""
        model = model_of(record.settings)
        sizes = record.settings | {"model": model}
        title = f"{CAPTIONS[model].title(sizes)}, B {sizes['batch']} each, {record.dtype}"
        common = {name: value for name, value in sizes.items() if name not in ("processes", "steps_a_sample")}
        return cls(title, model, json.dumps(common, sort_keys=True))


def newest(records: Sequence[Record], device: str = "") -> list[Record]:
    """Return the newest record of each row and number of processes on one device, in the order of `rows`.

    Rows that the benchmark no longer has are left out.

    Args:
        records: All records of a file, oldest first.
        device: A part of the device's name; empty for the device of the newest record.

    Raises:
        ArgumentError: No record is from such a device.
    """
    known = {way for training in TRAININGS.values() for way in training.ways.names}
    present = [record for record in of_device(records, device) if record.way in known]
    return [record for row in rows(present).values() for record in row.values()]


def rows(records: Sequence[Record]) -> dict[tuple[Sizes, str], dict[int, Record]]:
    """Return the records by sizes and way, language models and smallest batches first, and by the number of processes.

    Of several records with one number of processes, the last is returned.
    """
    found: dict[tuple[Sizes, str], dict[int, Record]] = {}
    models = list(CAPTIONS)
    for record in sorted(records, key=lambda each: (models.index(model_of(each.settings)), each.settings["batch"])):
        found.setdefault((Sizes.of(record), record.way), {})[record.settings["processes"]] = record
    return found


def speed_up(row: dict[int, Record], processes: int) -> float | None:
    """Return the speed of several processes over that of one; None if one of them was not measured."""
    one, several = row.get(1), row.get(processes)
    if one is None or several is None or not one.words_per_second or not several.words_per_second:
        return None
    return several.words_per_second / one.words_per_second


def on_screen(records: Sequence[Record]) -> RenderableType:
    """Return the tables for the terminal, with the reasons of rows without a speed."""
    parts: list[RenderableType] = []
    for sizes, lines in _tables(records).items():
        counts = _counts(records, sizes.model)
        table = plain_table(sizes.title, ["way", *map(str, counts)], left=["way"])
        for way, row in lines:
            bad = any(each.status != MEASURED for each in row.values())
            table.add_row(way, *(_cell(row, count) for count in counts), style="bold red" if bad else "")
        parts += [table, Text("")]
    parts += [Text(note, style="red") for note in _notes(records)]
    parts.append(Text(_origin(records) if records else "No row was finished."))
    return Group(*parts)


def markdown(records: Sequence[Record]) -> str:
    """Return the tables as Markdown, for pages."""
    parts = []
    for sizes, lines in _tables(records).items():
        counts, words = _counts(records, sizes.model), CAPTIONS[sizes.model].words
        parts += [f"**{sizes.title}**, {words}/s (efficiency) by the number of processes:", ""]
        parts += [f"| way | {' | '.join(map(str, counts))} |", f"|---|{'---:|' * len(counts)}"]
        parts += [f"| {way} | {' | '.join(_cell(row, count) for count in counts)} |" for way, row in lines]
        parts.append("")
    parts += [f"- {note}" for note in _notes(records)]
    for model in dict.fromkeys(sizes.model for sizes, _ in rows(records)):
        parts += [CAPTIONS[model].legend, ""]
    return "\n".join([*parts, _origin(records)])


def report(records: Sequence[Record]) -> str:
    """Return the complete report in Markdown: the tables, then the time of a step of each row."""
    parts = ["# `gatewise bench scale`", "", commands([each.run for each in records]), "", markdown(records), ""]
    parts += ["| sizes | way | processes | ms/step | 20-80 % | words/s |", "|---|---|---:|---:|---:|---:|"]
    for (sizes, way), row in rows(records).items():
        for count, record in row.items():
            timing = record.timing
            times = ["", "", record.status]
            if timing is not None:
                spread = f"{1e3 * timing.q20:.3g}-{1e3 * timing.q80:.3g}"
                times = [f"{1e3 * timing.median:.3g}", spread, f"{record.words_per_second:,.0f}"]
            parts.append(f"| {sizes.title} | {way} | {count} | {' | '.join(times)} |")
    return "\n".join(parts) + "\n"


def _tables(records: Sequence[Record]) -> dict[Sizes, list[tuple[str, dict[int, Record]]]]:
    found: dict[Sizes, list[tuple[str, dict[int, Record]]]] = {}
    for (sizes, way), row in rows(records).items():
        found.setdefault(sizes, []).append((way, row))
    return found


def _cell(row: dict[int, Record], count: int) -> str:
    record, factor = row.get(count), speed_up(row, count)
    if record is None:
        return ""
    if not record.words_per_second:
        return record.status
    return f"{record.words_per_second:,.0f}" + (f" ({100 * factor / count:.0f} %)" if factor and count > 1 else "")


def _counts(records: Sequence[Record], model: str) -> list[int]:
    return sorted({each.settings["processes"] for each in records if model_of(each.settings) == model})


def _notes(records: Sequence[Record]) -> list[str]:
    return [
        f"{each.way}, {Sizes.of(each).title}, {each.settings['processes']} processes: {each.status}. {each.note}"
        for each in records
        if each.status != MEASURED or NO_GRAPH in each.note
    ]


def _origin(records: Sequence[Record]) -> str:
    return provenance([record.run for record in records], in_turn=False)

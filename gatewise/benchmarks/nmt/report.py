"""Reports of the translation benchmark: tables for the terminal, a summary for pages, and all rows in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gatewise.benchmarks.nmt.parts import ATTENTION, LSTM, OUTPUT, PARTS
from gatewise.benchmarks.nmt.record import EAGER, GRAPH, REST, TranslationRecord
from gatewise.benchmarks.provenance import commands, provenance
from gatewise.benchmarks.record import MEASURED, REFUSED

_STYLES = {MEASURED: "", REFUSED: "dim"}  # every other status is red
_SHARES = (ATTENTION, LSTM, OUTPUT, REST)
_LEGEND = (
    "Sentence pairs a second, forward to update: eager, and replayed as a CUDA graph. x: the faster of them over plain "
    "PyTorch's eager. GB (10^9 bytes): all that is allocated at the peak of an eager step, and of it attention, LSTM, "
    "output softmax and the rest, weights and optimizer included. loss: seconds of training until the loss."
)
_FULL_COLUMNS = (
    "way",
    "eager, ms a step (20-80 %)",
    "graph (20-80 %)",
    "samples/s: eager",
    "graph",
    "over plain, eager",
    "B",
    "peak: eager",
    "graph",
    *PARTS,
    "seconds (steps) to the loss: eager",
    "graph",
    "error (allowed)",
)

Key = tuple[str, str]


def tables(records: Sequence[TranslationRecord]) -> dict[Key, list[TranslationRecord]]:
    """Return the records by case and precision, in their order."""
    found: dict[Key, list[TranslationRecord]] = {}
    for record in records:
        found.setdefault((record.case, record.dtype), []).append(record)
    return found


def plain_row(rows: Sequence[TranslationRecord]) -> TranslationRecord | None:
    """Return the row of plain PyTorch, with which others are compared; None if it was not measured."""
    return next((row for row in rows if row.plain and row.status == MEASURED), None)


def speed_up(record: TranslationRecord, rows: Sequence[TranslationRecord]) -> float | None:
    """Return the speed-up of a way, eager or as a graph, over plain PyTorch run eagerly."""
    plain = plain_row(rows)
    slow = plain.samples_per_second(EAGER) if plain else None
    return record.fastest / slow if record.fastest and slow else None


def on_screen(records: Sequence[TranslationRecord]) -> RenderableType:
    """Return a table for each case and precision, for a terminal of 80 columns."""
    if not records:
        return Text("No row was finished.")
    parts: list[RenderableType] = []
    for key, rows in tables(records).items():
        largest = rows[0].budget_bytes is not None
        table = Table(title=_title(key, rows), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.pad_edge = table.show_edge = False
        table.collapse_padding = True
        table.add_column("way", no_wrap=True)
        headings = ("eager", "graph", "x", "GB", "att", "LSTM", "out", "rest", "B" if largest else "loss")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for record in rows:
            table.add_row(*_cells(record, rows, largest), style=_STYLES.get(record.status, "bold red"))
        parts.append(table)
        parts += [
            Text(f"{record.way}: {record.status}. {record.note}", style=_STYLES.get(record.status, "red"))
            for record in rows
            if record.status != MEASURED
        ]
        parts.append(Text(""))
    parts += [Text(line) for line in findings(records)]
    parts += [Text(_LEGEND, style="dim"), Text(provenance([record.run for record in records]), style="dim")]
    return Group(*parts)


def findings(records: Sequence[TranslationRecord]) -> list[str]:
    """Return the main results: the best way compared with plain PyTorch, attention's memory, the largest batch."""
    lines = []
    by_table = tables(records)
    for (case, dtype), rows in by_table.items():
        plain = plain_row(rows)
        ours = [row for row in rows if not row.plain and row.fastest]
        if plain is None or not ours:
            continue
        best = max(ours, key=lambda row: row.fastest or 0.0)
        parts = [f"{best.way} trains {best.fastest:,.0f} samples/s, {speed_up(best, rows):.1f}x plain PyTorch"]
        replayed = plain.samples_per_second(GRAPH)
        if replayed and best.fastest:
            parts[0] += f" and {best.fastest / replayed:.1f}x plain PyTorch in a CUDA graph"
        parts += [room] if (room := _room(best, plain)) else []
        if plain.quickest and best.quickest:
            parts.append(f"loss {best.loss:g} after {best.quickest:.2g} s instead of {plain.quickest:.2g}")
        base = next((row for row in records if _is_base(row, best) and row.fastest), None)
        if base is not None and base.fastest and best.fastest:
            parts.append(f"{best.fastest / base.fastest:.2f}x of its speed at B {base.batch}")
        lines.append(f"{case}, {dtype}: {'; '.join(parts)}.")
    return [*lines, *_predictions(records)]


def _room(best: TranslationRecord, plain: TranslationRecord) -> str:
    """Return a way's memory compared with plain PyTorch's, or the batch that fits if both have the same budget."""
    if best.budget_bytes is not None:
        return f"{best.batch} sentence pairs a batch instead of {plain.batch}"
    theirs, mine = plain.peak_bytes.get(EAGER), best.peak_bytes.get(EAGER)
    parts = [f"in {_gigabytes(mine)} GB instead of {_gigabytes(theirs)}"] if theirs and mine else []
    if plain.parts.get(ATTENTION) and best.parts.get(ATTENTION):
        factor = plain.parts[ATTENTION] / best.parts[ATTENTION]
        parts.append(f"attention's share {factor:.3g} times smaller" if factor > 1 else "attention's share larger")
    return "; ".join(parts)


def _predictions(records: Sequence[TranslationRecord]) -> list[str]:
    """Return a sentence about the accuracy of predicted peaks; empty if there are none."""
    found = [
        (peak / record.predicted_bytes, f"{record.case}, {record.dtype}")
        for record in records
        if record.predicted_bytes and (peak := record.peak_bytes.get(EAGER))
    ]
    if not found:
        return []
    near = sum(ratio <= 1.1 for ratio, _ in found)
    (least, _), (most, where) = min(found), max(found)
    return [
        f"Planned: the measured peak is {least:.2f} to {most:.2f} of the predicted one (most in {where}), at most 10 % "
        f"above it in {near} of {len(found)}."
    ]


def markdown(records: Sequence[TranslationRecord]) -> str:
    """Return the summary for a page: a table for each precision, with a column for each case, and the main results."""
    lines = []
    for dtype in dict.fromkeys(record.dtype for record in records):
        rows = [record for record in records if record.dtype == dtype]
        cases = list(dict.fromkeys(record.case for record in rows))
        of_case = {case: [row for row in rows if row.case == case] for case in cases}
        lines += [f"**{dtype}**: samples/s, GB at the peak", ""]
        lines += [f"| way | {' | '.join(_heading(of_case[case][0]) for case in cases)} |"]
        lines += [f"|---|{'---:|' * len(cases)}"]
        for way in dict.fromkeys(row.way for row in rows):
            found = [next((row for row in of_case[case] if row.way == way), None) for case in cases]
            plain = any(row is not None and row.plain for row in found)
            for how, note in ((EAGER, ""), (GRAPH, ", as a CUDA graph")) if plain else ((None, ""),):
                cells = [_markdown_cell(row, how) for row in found]
                if any(cells):
                    lines.append(f"| {way}{note} | {' | '.join(cells)} |")
        lines.append("")
    lines += [f"- {line}" for line in findings(records)]
    return "\n".join([*lines, "", provenance([record.run for record in records])])


def report(records: Sequence[TranslationRecord]) -> str:
    """Return the complete report in Markdown: the summary, then all rows with quantiles, memory and errors."""
    made_by = commands([record.run for record in records])
    parts = ["# `gatewise bench nmt`", "", markdown(records), "", _LEGEND, "", "Made by", "", made_by, ""]
    for key, rows in tables(records).items():
        parts += [f"## {_title(key, rows)}", "", f"| {' | '.join(_FULL_COLUMNS)} |"]
        parts += [f"|---|{'---:|' * (len(_FULL_COLUMNS) - 1)}"]
        parts += [f"| {' | '.join(_full_cells(record, rows))} |" for record in rows]
        parts += ["", *(f"- {row.way}: {row.status}. {row.note}" for row in rows if row.status != MEASURED), ""]
    return "\n".join(parts).rstrip() + "\n"


def _is_base(row: TranslationRecord, largest: TranslationRecord) -> bool:
    """Return whether a row is the same way with the batch size to which the largest batch is compared."""
    if largest.budget_bytes is None or row.budget_bytes is not None:
        return False
    same = all(row.settings[name] == largest.settings[name] for name in row.settings if name not in ("name", "batch"))
    return same and (row.way, row.dtype) == (largest.way, largest.dtype)


def _title(key: Key, rows: Sequence[TranslationRecord]) -> str:
    budget = rows[0].budget_bytes
    within = "" if budget is None else f", largest batch under {budget / 1e9:g} GB"
    loss = next((row.loss for row in rows if row.loss is not None), None)
    return f"{key[0]}, {key[1]}{within}{'' if loss is None else f', until loss {loss:g}'}"


def _heading(record: TranslationRecord) -> str:
    name = record.case.partition("-")[0]
    lengths = f"{record.settings['source']}/{record.settings['target']}"
    batch = f"under {record.budget_bytes / 1e9:g} GB" if record.budget_bytes else f"B {record.batch}"
    return f"{name} {lengths}, {batch}"


def _cells(record: TranslationRecord, rows: Sequence[TranslationRecord], largest: bool) -> list[str]:
    if record.status != MEASURED:
        return [record.way, record.status, *[""] * 8]
    shares = record.shares()
    factor = speed_up(record, rows)
    return [
        record.way,
        _rate(record, EAGER),
        _rate(record, GRAPH),
        "" if factor is None else f"{factor:.1f}",
        _gigabytes(record.peak_bytes.get(EAGER)),
        *(_gigabytes(shares.get(part)) for part in _SHARES),
        str(record.batch) if largest else "" if record.quickest is None else f"{record.quickest:.3g}",
    ]


def _full_cells(record: TranslationRecord, rows: Sequence[TranslationRecord]) -> list[str]:
    if record.status != MEASURED:
        return [record.way, record.status, *[""] * (len(_FULL_COLUMNS) - 2)]
    factor = speed_up(record, rows)
    return [
        record.way,
        _spread(record, EAGER),
        _spread(record, GRAPH),
        _rate(record, EAGER),
        _rate(record, GRAPH),
        "" if factor is None else f"{factor:.2f}x",
        str(record.batch),
        _gigabytes(record.peak_bytes.get(EAGER)),
        _gigabytes(record.peak_bytes.get(GRAPH)),
        *(_gigabytes(record.parts.get(part)) for part in PARTS),
        *(_until(record, how) for how in (EAGER, GRAPH)),
        "" if record.error is None else f"{record.error:.1e} ({record.allowed:.1e})",
    ]


def _markdown_cell(record: TranslationRecord | None, how: str | None) -> str:
    """Return the speed and the peak memory of a row, for eager, graph, or the faster of them."""
    if record is None:
        return ""
    if record.status != MEASURED:
        return record.status if how != GRAPH else ""
    rate = record.fastest if how is None else record.samples_per_second(how)
    if rate is None:
        return ""
    peak = record.peak_bytes.get(how or EAGER)
    parts = [f"{rate:,.0f}", *([f"{_gigabytes(peak)} GB"] if peak else [])]
    return ", ".join([*parts, *([f"B {record.batch}"] if record.budget_bytes else [])])


def _rate(record: TranslationRecord, how: str) -> str:
    rate = record.samples_per_second(how)
    return "" if rate is None else f"{rate:,.0f}"


def _spread(record: TranslationRecord, how: str) -> str:
    timing = record.times.get(how)
    if timing is None:
        return ""
    return f"{1e3 * timing.median:.3g} ({1e3 * timing.q20:.3g}-{1e3 * timing.q80:.3g})"


def _until(record: TranslationRecord, how: str) -> str:
    seconds = record.seconds_to_loss.get(how)
    return "" if seconds is None else f"{seconds:.3g} ({record.steps_to_loss[how]})"


def _gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f}"

"""Reports from records: tables for the terminal, Markdown and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gatewise.benchmarks.provenance import provenance
from gatewise.benchmarks.record import MEASURED, REFUSED, Record
from gatewise.contract.decision import format_bytes
from gatewise.contract.errors import ArgumentError, MissingExtra, sentence
from gatewise.files import write_text
from gatewise.training.pictures import save_picture

_STYLES = {MEASURED: "", REFUSED: "dim"}  # every other status is red


def speed_up(record: Record, beside: Sequence[Record]) -> float | None:
    """Return the speed-up of a record over the first measured one of its table; None if it has no speed."""
    first = next((other.words_per_second for other in beside if other.words_per_second), None)
    if first is None or not record.words_per_second:
        return None
    return record.words_per_second / first


def tables(records: Sequence[Record]) -> dict[tuple[int, str], list[Record]]:
    """Return the records by vocabulary and precision, in their order."""
    found: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.settings["vocabulary"], record.dtype), []).append(record)
    return found


def on_screen(records: Sequence[Record]) -> RenderableType:
    """Return the tables of one run for a terminal of 80 columns, with the reasons of rows without a speed."""
    parts: list[RenderableType] = []
    for (vocabulary, dtype), rows in tables(records).items():
        title = f"{rows[0].case}, {vocabulary:,} words, {dtype}"
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            show_edge=False,
            collapse_padding=True,
        )
        table.add_column("way", no_wrap=True)
        for heading in ("words/s", "ms/batch", "20-80 %", "peak memory", "speed-up"):
            table.add_column(heading, justify="right", no_wrap=True)
        for record in rows:
            table.add_row(*_cells(record, rows), style=_STYLES.get(record.status, "bold red"))
        parts.append(table)
        parts += [
            Text(f"{record.way}: {record.status}. {record.note}", style=_STYLES.get(record.status, "red"))
            for record in rows
            if record.status != MEASURED
        ]
        parts.append(Text(""))
    parts.append(Text(_origin(records) if records else "No row was finished."))
    return Group(*parts)


def markdown(records: Sequence[Record]) -> str:
    """Return one run as Markdown: a table for each vocabulary, with words/s by way and precision.

    Speed-ups, in brackets, are relative to the first row of the same column.
    """
    by_table = tables(records)
    parts = []
    for vocabulary in dict.fromkeys(vocabulary for vocabulary, _ in by_table):
        columns = {dtype: rows for (words, dtype), rows in by_table.items() if words == vocabulary}
        settings = records[0].settings
        sizes = (
            f"{settings['num_layers']} x {settings['hidden_size']}, B {settings['batch']}, T {settings['time']}, "
            f"{vocabulary:,} words"
        )
        parts.append(f"**{records[0].case}** ({sizes}), words/s (speed-up over the first row):\n")
        parts.append(f"| way | {' | '.join(columns)} |")
        parts.append(f"|---|{'---:|' * len(columns)}")
        for way in dict.fromkeys(record.way for rows in columns.values() for record in rows):
            cells = [_markdown_cell(way, rows) for rows in columns.values()]
            parts.append(f"| {way} | {' | '.join(cells)} |")
        parts.append("")
    parts.append(_origin(records))
    return "\n".join(parts)


def report(records: Sequence[Record]) -> str:
    """Return the complete report of one run in Markdown: the summary, then all rows with quantiles and memory."""
    parts = [f"# `{records[0].run.command}`", "", markdown(records), ""]
    for (vocabulary, dtype), rows in tables(records).items():
        parts += [
            f"## {vocabulary:,} words, {dtype}",
            "",
            "| way | words/s | ms/batch | 20-80 % | peak memory | speed-up | error (allowed) |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for record in rows:
            error = "" if record.error is None else f"{record.error:.1e} ({record.allowed:.1e})"
            parts.append(f"| {' | '.join([*_cells(record, rows), error])} |")
        parts += ["", *(f"- {row.way}: {row.status}. {row.note}" for row in rows if row.status != MEASURED), ""]
    return "\n".join(parts).rstrip() + "\n"


def fill_block(page: Path, name: str, content: str) -> bool:
    """Replace the text between the marks `<!-- benchmark: NAME -->` and `<!-- /benchmark: NAME -->` of a page.

    Args:
        page: The Markdown file with both marks.
        name: The name of the benchmark.
        content: The new text between the marks.

    Returns:
        Whether the page changed.

    Raises:
        ArgumentError: The page lacks the marks.
    """
    begin, end = f"<!-- benchmark: {name} -->", f"<!-- /benchmark: {name} -->"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ArgumentError(sentence("--into", f"a page with the lines {begin} and {end}", f"'{page}'"))
    filled = f"{before}{begin}\n{content.strip()}\n{end}{after}"
    if filled != text:
        write_text(page, filled)
    return filled != text


def plot(records: Sequence[Record], path: Path) -> None:
    """Plot one run as bars, words/s by way and precision, with the 20 and 80 % quantiles.

    Args:
        records: The records of one run.
        path: The file; its suffix determines the format (.png, .svg, .pdf).

    Raises:
        MissingExtra: matplotlib is not installed.
        ArgumentError: No row has a speed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra.for_package("matplotlib", "Drawing a plot", "train") from error
    measured = [record for record in records if record.words_per_second]
    if not measured:
        raise ArgumentError(sentence("--plot", "drawn from at least one measured row", "none"))
    vocabularies = list(dict.fromkeys(record.settings["vocabulary"] for record in measured))
    dtypes = list(dict.fromkeys(record.dtype for record in measured))
    ways = list(dict.fromkeys(record.way for record in measured))
    height = 0.8 / len(dtypes)
    figure = Figure(figsize=(5.5 * len(vocabularies), 1.6 + 0.28 * len(ways) * len(dtypes)), layout="constrained")
    for axes, vocabulary in zip(figure.subplots(1, len(vocabularies), squeeze=False)[0], vocabularies, strict=True):
        for place, dtype in enumerate(dtypes):
            rows = [row for row in measured if (row.settings["vocabulary"], row.dtype) == (vocabulary, dtype)]
            heights = [ways.index(row.way) + height * (place - (len(dtypes) - 1) / 2) for row in rows]
            speeds, slow, fast = zip(*map(_bar, rows), strict=True) if rows else ((), (), ())
            axes.barh(heights, speeds, height, xerr=(slow, fast), label=dtype, error_kw={"elinewidth": 0.8})
        axes.set_yticks(range(len(ways)), ways)
        axes.invert_yaxis()
        axes.set_xlabel("thousand words a second, training")
        axes.set_title(f"{measured[0].case}, {vocabulary:,} words", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].legend(frameon=False, fontsize="small")
    figure.suptitle(measured[0].run.device, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_picture(figure, path, dpi=150)


def _bar(record: Record) -> tuple[float, float, float]:
    """Return a measured record's speed in thousand words per second, and the distances to its quantiles."""
    timing = record.timing
    assert timing is not None
    assert record.words_per_second is not None
    speed = record.words_per_second / 1e3
    return speed, speed * (1 - timing.median / timing.q80), speed * (timing.median / timing.q20 - 1)


def _origin(records: Sequence[Record]) -> str:
    return f"{provenance([record.run for record in records])} A training step: forward, loss, backward, clip, SGD."


def _cells(record: Record, rows: Sequence[Record]) -> list[str]:
    if record.median is None or record.q20 is None or record.q80 is None:
        return [record.way, record.status, "", "", "", ""]
    factor = speed_up(record, rows)
    return [
        record.way,
        f"{record.words_per_second:,.0f}",
        _digits(1e3 * record.median),
        f"{_digits(1e3 * record.q20)}-{_digits(1e3 * record.q80)}",
        "-" if record.peak_bytes is None else format_bytes(record.peak_bytes),
        f"{factor:.2f}x",
    ]


def _markdown_cell(way: str, rows: Sequence[Record]) -> str:
    record = next((row for row in rows if row.way == way), None)
    if record is None:
        return ""
    factor = speed_up(record, rows)
    return record.status if factor is None else f"{record.words_per_second:,.0f} ({factor:.1f}x)"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"

"""Reports show the contents of records, in 80 columns and in Markdown."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from gatewise.benchmarks.cells import picture, record, report
from gatewise.benchmarks.cells.record import (
    CELL,
    LOOP,
    PLAIN,
    RESETS,
    STEP,
    WEIGHT_DROPOUT,
    WHOLE,
    ZONEOUT,
    CellRecord,
    Measurement,
)
from gatewise.contract.errors import ArgumentError
from gatewise.selection.timing import Timing


def slower(row: CellRecord, factor: float, way: str, **changes: object) -> CellRecord:
    """Return the same row with the times of a way multiplied."""
    times = {
        how: Timing(factor * timing.median, factor * timing.q20, factor * timing.q80, timing.runs)
        for how, timing in row.ways[way].times.items()
    }
    ways = row.ways | {way: dataclasses.replace(row.ways[way], times=times)}
    return dataclasses.replace(row, ways=ways, **changes)


def without(row: CellRecord, way: str, status: str, note: str, **changes: object) -> CellRecord:
    """Return the same row with a way that was not measured."""
    return dataclasses.replace(row, ways=row.ways | {way: Measurement(status, note)}, **changes)


def printed(rows: list[CellRecord], *, colour: bool = False) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=colour, color_system="standard" if colour else None).print(
        report.on_screen(rows)
    )
    return stream.getvalue()


@pytest.fixture
def rows(cell: CellRecord) -> list[CellRecord]:
    return [
        cell,
        slower(cell, 4, LOOP, case="200-8-512"),
        without(cell, STEP, "failed", "out of memory", cell="slstm"),
        without(slower(cell, 2, CELL), LOOP, "failed", "out of memory", cell="slstm", case="200-8-512"),
        without(cell, CELL, "wrong", "dx is off", cell="mgu"),
        slower(cell, 2, CELL, direction="inference"),
    ]


def test_figures_of_a_row(cell: CellRecord) -> None:
    assert (cell.ratio(LOOP, "eager"), cell.ratio(LOOP, "graph")) == pytest.approx((40, 16))
    assert report.over_plain(cell, "graph", "eager") == pytest.approx(1.25)
    assert report.over_plain(cell, "eager") == pytest.approx(1 / 0.9)
    assert report.over_plain(dataclasses.replace(cell, cell="lstm"), "graph") == 1
    assert report.over_cell(cell, RESETS, "graph") == pytest.approx(1.02)
    assert report.memory_ratio(cell) == pytest.approx(0.25)
    assert report.memory_ratio(dataclasses.replace(cell, settings=cell.settings | {"time": 1})) is None
    assert report.error_ratio(cell) == 1.04
    eager = {"eager": cell.ways[CELL].times["eager"]}
    uncaptured = dataclasses.replace(cell, ways=cell.ways | {CELL: dataclasses.replace(cell.ways[CELL], times=eager)})
    assert report.over_plain(uncaptured, "graph", "eager") == pytest.approx(1 / 0.9)
    assert uncaptured.ratio(LOOP, "graph") is None


def test_the_status_of_a_row_is_that_of_gatewise(cell: CellRecord) -> None:
    assert cell.status == "measured"
    assert without(cell, STEP, "failed", "no compiler").status == "measured"
    assert without(cell, RESETS, "failed", "out of memory").status == "failed"
    assert without(without(cell, RESETS, "failed", ""), CELL, "wrong", "").status == "wrong"


def test_a_record_survives_its_file(cell: CellRecord) -> None:
    assert CellRecord.from_line(json.dumps(dataclasses.asdict(cell))) == cell


def test_screen(rows: list[CellRecord]) -> None:
    text = printed(rows)
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    eager, graph = (lines.index(f"bf16, train step, {how}") for how in ("eager", "CUDA graph"))
    assert lines[eager + 1] == "cell n LSTM nn loop step resets memory error"
    assert lines[eager + 3] == "gru 2 1.11 4.00x 80.0x 50.0x 1.10 0.25 1.04"  # the loop: 40 and 160 times as fast
    assert lines[graph + 3] == "gru 2 1.25 3.00x 32.0x 8.00x 1.02 0.25 1.04"
    assert lines[graph + 4] == "slstm 2 1.77 2.12x 16.0x* 4.00x* 0.72 0.25* 1.04"
    whole = " ".join(text.split())
    assert "compiled-step: failed. out of memory (slstm 100-64-512 bf16 train)" in whole
    assert "gatewise: wrong. dx is off (mgu 100-64-512 bf16 train)" in whole
    assert "NVIDIA H200; PyTorch 2.9.0" in whole


def test_shortfalls_are_named(cell: CellRecord) -> None:
    slow = slower(cell, 4, CELL, cell="slstm")
    coarse = dataclasses.replace(cell, ways=cell.ways | {CELL: dataclasses.replace(cell.ways[CELL], error_ratio=1.31)})
    found = [" ".join(text.split()) for text in (printed([slow, coarse]), report.report([slow, coarse]))]
    for text in found:
        assert "Slower than nn.LSTM, in a CUDA graph where there is one: slstm 100-64-512 bf16 train 0.75x." in text
        assert "Errors above 1.3 times the loop's: gru 100-64-512 bf16 train 1.31x." in text
    assert "Slower than" not in report.report([cell])
    assert "Errors above" not in report.report([cell])


def test_only_rows_that_are_wrong_or_failed_are_red(rows: list[CellRecord]) -> None:
    red = [line for line in printed(rows, colour=True).splitlines() if "\x1b[1;31m" in line]
    assert len(red) == 2  # eager and graph
    assert all("mgu" in line for line in red)


def test_nothing_finished() -> None:
    assert printed([]).strip() == "No row was finished."


def test_markdown(rows: list[CellRecord]) -> None:
    lines = report.markdown(rows).splitlines()
    assert lines[0] == "**bf16, train step**"
    assert lines[2].startswith("| cell | cases | LSTM | nn.LSTM, eager | nn.LSTM, graph | loop, eager | loop, graph |")
    gru = "| gru | 2 | 1.25 | 4.00x | 3.00x | 80.0x | 32.0x | 50.0x | 8.00x | 1.02 | 0.25 | 1.04 |"
    assert gru in lines
    # Means over fewer cases say over how many: one case has no loop, the other no compiled step.
    (slstm,) = [line for line in lines if line.startswith("| slstm")]
    assert "| 40.0x (1) | 16.0x (1) | 25.0x (1) | 4.00x (1) |" in slstm
    assert "| mgu | 0 |" in "\n".join(lines)
    assert "**bf16, inference**" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {13}


def test_masks_have_tables_of_their_own(cell: CellRecord) -> None:
    masks = {ZONEOUT: slower(cell, 1.02, CELL).ways[CELL], WEIGHT_DROPOUT: slower(cell, 1.05, CELL).ways[CELL]}
    rows = [dataclasses.replace(cell, ways=cell.ways | masks), dataclasses.replace(cell, case="200-8-512")]
    lines = report.markdown([*rows, dataclasses.replace(cell, direction="inference")]).splitlines()
    (header,) = [index for index, line in enumerate(lines) if "zoneout |" in line]
    assert lines[header] == "| precision | cell | cases | weight-dropout | zoneout |"
    assert lines[header + 2 : header + 4] == ["| bf16 | gru | 2 | 1.05 (1) | 1.02 (1) |", ""]
    text = [" ".join(line.split()) for line in printed(rows).splitlines()]
    assert text[text.index("bf16, CUDA graph, over no masks") + 3] == "gru 2 1.05* 1.02*"
    assert "over no masks" not in printed([cell])


def test_ways_that_nothing_measured_have_no_column(cell: CellRecord) -> None:
    assert "compiled loop, eager" not in report.markdown([cell])
    whole = dataclasses.replace(cell, ways=cell.ways | {WHOLE: cell.ways[STEP]})
    assert "| compiled loop, eager |" in report.markdown([whole])


def test_whole_report(rows: list[CellRecord]) -> None:
    other = dataclasses.replace(rows[0].ways[CELL], ran_captured="stepwise")
    text = report.report([*rows, dataclasses.replace(rows[0], case="c", ways=rows[0].ways | {CELL: other})])
    assert text.startswith("# `gatewise bench cells`\n")
    assert f"- `{rows[0].run.command}`\n" in text
    assert (
        "| gru | 100-64-512 | 10 / 5 | 9 / 4 | 11 / 5.1 | 40 / 15 | 400 / 80 | 500 / 40 | "
        "20 MiB (80 MiB) | 1.04 | persistent |"
    ) in text
    assert "| persistent, in a graph stepwise |" in text
    assert "| wrong |" in text
    assert "- loop: failed. out of memory (slstm 200-8-512 bf16 train)" in text
    columns = {line.count("|") for line in text.split("## bf16, train step\n")[1].splitlines() if line.startswith("|")}
    assert len(columns) == 1


def test_the_newest_record_of_every_row_and_way(cell: CellRecord) -> None:
    again = slower(cell, 0.5, CELL)
    assert record.newest([cell, again]) == [again]
    inference = dataclasses.replace(cell, direction="inference")
    assert record.newest([cell, inference]) == [cell, inference]
    only_step = dataclasses.replace(again, ways={name: again.ways[name] for name in (CELL, PLAIN)})
    (merged,) = record.newest([cell, only_step])
    assert merged.ways[CELL] == again.ways[CELL]
    assert merged.ways[STEP] == cell.ways[STEP]
    with pytest.raises(ArgumentError, match="part of a recorded device's name: NVIDIA H200, got 'mi300'"):
        record.newest([cell], "mi300")


def test_picture(rows: list[CellRecord], tmp_path: Path) -> None:
    png, svg = picture.draw(rows, tmp_path / "new" / "cells")
    assert png.read_bytes().startswith(b"\x89PNG")
    first = svg.read_bytes()
    assert first.startswith(b"<?xml")
    assert picture.draw(rows, tmp_path / "new" / "cells")[1].read_bytes() == first
    assert picture.draw([slower(rows[0], 3, CELL), *rows[1:]], tmp_path / "new" / "cells")[1].read_bytes() != first
    assert picture.draw(rows, tmp_path / "new" / "cells", "inference")[1].read_bytes() != first


def test_a_picture_shows_one_precision_of_measured_cells(rows: list[CellRecord]) -> None:
    other = dataclasses.replace(rows[0], dtype="tf32")
    assert {(row.dtype, row.cell) for row in picture.drawable([*rows, other])} == {("bf16", "gru"), ("bf16", "slstm")}


def test_a_picture_needs_a_speed_up(rows: list[CellRecord], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one measured row"):
        picture.draw(rows[4:5], tmp_path / "cells")

"""Reports show the contents of records, in 80 columns and in Markdown."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from gatewise.benchmarks import report, rivals
from gatewise.benchmarks.record import Record
from gatewise.contract.errors import ArgumentError
from tests.pairwise import exhaustive_unless

RED = "\x1b[1;31m"


@pytest.fixture
def rows(row: Record) -> list[Record]:
    no_speed = {"median": None, "q20": None, "q80": None, "runs": 0, "words_per_second": None, "peak_bytes": None}
    return [
        row,
        dataclasses.replace(row, way="nn.LSTM", words_per_second=140_000.0, median=0.005, q20=0.0049, q80=0.0051),
        dataclasses.replace(row, way="gatewise cudnn", status="refused", note="device is a toaster", **no_speed),
        dataclasses.replace(row, way="gatewise new", status="wrong", note="loss is off", **no_speed),
        dataclasses.replace(row, dtype="bf16", words_per_second=70_000.0, median=0.01, q20=0.01, q80=0.01),
    ]


def printed(rows: list[Record], *, colour: bool = False) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=colour, color_system="standard" if colour else None).print(
        report.on_screen(rows)
    )
    return stream.getvalue()


def test_screen(rows: list[Record]) -> None:
    text = printed(rows)
    assert max(map(len, text.splitlines())) <= 80
    cell, lstm, refused, wrong = text.splitlines()[3:7]
    assert cell.split()[-6:] == ["35,000", "20", "19-23", "3", "GiB", "1.00x"]
    assert lstm.split() == ["nn.LSTM", "140,000", "5", "4.9-5.1", "3", "GiB", "4.00x"]
    assert refused.split() == ["gatewise", "cudnn", "refused"]
    assert wrong.split() == ["gatewise", "new", "wrong"]
    assert "gatewise cudnn: refused. device is a toaster" in text
    assert "gatewise new: wrong. loss is off" in text
    assert "NVIDIA H200; PyTorch 2.9.0, gatewise 0.1.0, CUDA 12.8, cuDNN 9.19.0" in " ".join(text.split())


def test_the_longest_names_and_figures_are_not_cut_off(row: Record) -> None:
    longest = max((way.name for way in rivals.ways()), key=len)
    slow = dataclasses.replace(row, way=longest, words_per_second=987_654.0, median=0.0234, q20=0.0223, q80=0.0245)
    text = printed([row, slow])
    assert "…" not in text
    (line,) = [line for line in text.splitlines() if line.startswith(longest)]
    assert line.removeprefix(longest).split() == ["987,654", "23.4", "22.3-24.5", "3", "GiB", "28.22x"]


def test_only_wrong_rows_are_red(rows: list[Record]) -> None:
    red = [line for line in printed(rows, colour=True).splitlines() if RED in line]
    assert len(red) == 1
    assert "gatewise new" in red[0]


def test_nothing_finished() -> None:
    assert printed([]).strip() == "No row was finished."


def test_speed_up_is_over_the_first_row_with_a_speed(rows: list[Record]) -> None:
    table = rows[2:3] + rows[:2]
    assert [report.speed_up(row, table) for row in table] == [None, 1.0, 4.0]
    assert report.speed_up(rows[2], rows[2:3]) is None


def test_markdown(rows: list[Record]) -> None:
    lines = report.markdown(rows).splitlines()
    assert "| way | tf32 | bf16 |" in lines
    assert "| nn.LSTMCell loop | 35,000 (1.0x) | 70,000 (1.0x) |" in lines
    assert "| nn.LSTM | 140,000 (4.0x) |  |" in lines
    assert "| gatewise cudnn | refused |  |" in lines
    assert lines[-1].startswith("NVIDIA H200; PyTorch 2.9.0")
    assert "commit 0123456789." in lines[-1]


def test_whole_report(rows: list[Record]) -> None:
    text = report.report(rows)
    assert text.startswith("# `gatewise bench lm`\n")
    assert "## 10,000 words, tf32" in text
    assert "| nn.LSTM | 140,000 | 5 | 4.9-5.1 | 3 GiB | 4.00x | 1.0e-04 (2.0e-03) |" in text
    assert "- gatewise new: wrong. loss is off" in text


def test_the_block_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- benchmark: lm -->\nold\n<!-- /benchmark: lm -->\nafter\n")
    assert report.fill_block(page, "lm", "new\n")
    assert page.read_text() == "before\n<!-- benchmark: lm -->\nnew\n<!-- /benchmark: lm -->\nafter\n"
    assert not report.fill_block(page, "lm", "new\n")


@pytest.mark.parametrize(
    "text", ["nothing", "<!-- benchmark: lm -->\n", "<!-- /benchmark: lm --><!-- benchmark: lm -->"]
)
def test_a_page_without_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(ArgumentError, match="`--into` must be a page with the lines <!-- benchmark: lm -->"):
        report.fill_block(page, "lm", "new")
    assert page.read_text() == text


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), *exhaustive_unless([], [(".pdf", b"%PDF")])]
)
def test_plot(rows: list[Record], tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / "new" / f"lm{suffix}"
    report.plot(rows, path)
    first = path.read_bytes()
    assert first.startswith(magic)
    report.plot(rows, path)
    assert path.read_bytes() == first


def test_a_plot_needs_a_speed(rows: list[Record], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one measured row"):
        report.plot(rows[2:4], tmp_path / "lm.png")

"""Tables, pages and plots from records."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from gatewise.benchmarks import record as records_of
from gatewise.benchmarks.nmt import picture, record, report
from gatewise.benchmarks.nmt.record import TranslationRecord
from gatewise.benchmarks.publication import publication
from gatewise.contract.errors import ArgumentError
from gatewise.selection.timing import Timing


@pytest.fixture
def largest(ours: TranslationRecord) -> TranslationRecord:
    return dataclasses.replace(
        ours,
        case="iwslt-50-50-largest",
        settings=ours.settings | {"name": "iwslt-50-50-largest", "batch": 1024},
        times={"eager": Timing(0.06, 0.06, 0.06, 5), "graph": Timing(0.032, 0.03, 0.033, 5)},
        peak_bytes={"eager": 7_900_000_000},
        budget_bytes=8_000_000_000,
        loss=None,
        seconds_to_loss={},
    )


@pytest.fixture
def largest_plain(plain: TranslationRecord, largest: TranslationRecord) -> TranslationRecord:
    return dataclasses.replace(
        largest,
        **{name: getattr(plain, name) for name in ("way", "attention", "lstm", "times", "parts")},
        settings=largest.settings | {"batch": 320},
    )


@pytest.fixture
def refused(plain: TranslationRecord) -> TranslationRecord:
    return dataclasses.replace(
        plain, way="fused, nn.LSTM", attention="fused", status="refused", note="it is shy", times={}, parts={}
    )


def shown(records: list[TranslationRecord]) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(report.on_screen(records))
    return console.file.getvalue()


def test_screen(plain, ours, refused) -> None:
    lines = shown([plain, refused, ours]).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].rstrip() == "iwslt-50-50-128, tf32, until loss 6"
    assert lines[1].split() == ["way", "eager", "graph", "x", "GB", "att", "LSTM", "out", "rest", "loss"]
    rows = {line[:19].strip(): line.split() for line in lines[3:6]}
    assert rows["plain PyTorch"][2:] == ["2,560", "5,120", "2.0", "3.50", "2.00", "0.40", "0.50", "0.60", "2.5"]
    assert rows["fused, gatewise"][2:] == ["3,200", "16,000", "6.2", "1.00", "0.05", "0.40", "0.50", "0.45", "0.8"]
    text = " ".join(shown([plain, refused, ours]).split())
    assert "fused, nn.LSTM: refused. it is shy" in text
    assert (
        "iwslt-50-50-128, tf32: fused, gatewise trains 16,000 samples/s, 6.2x plain PyTorch and 3.1x plain "
        "PyTorch in a CUDA graph; in 1.00 GB instead of 3.50; attention's share 40 times smaller; "
        "loss 6 after 0.8 s instead of 2.5."
    ) in text


def test_the_largest_batch_is_compared_with_the_usual_one(plain, ours, largest, largest_plain) -> None:
    text = " ".join(shown([plain, ours, largest_plain, largest]).split())
    assert "iwslt-50-50-largest, tf32, largest batch under 8 GB" in text
    assert "fused, gatewise 17,067 32,000" in text
    assert "1024 sentence pairs a batch instead of 320; 2.00x of its speed at B 128." in text
    assert "in 7.90 GB instead of" not in text
    table = report.markdown([plain, ours, largest_plain, largest])
    assert "| way | iwslt 50/50, B 128 | iwslt 50/50, under 8 GB |" in table
    assert "| fused, gatewise | 16,000, 1.00 GB | 32,000, 7.90 GB, B 1024 |" in table
    assert "| plain PyTorch | 2,560, 3.50 GB | 6,400, 7.90 GB, B 320 |" in table
    assert "| plain PyTorch, as a CUDA graph | 5,120, 3.60 GB | 12,800, B 320 |" in table


def test_plans_are_held_to_what_they_predicted(plain, ours) -> None:
    assert "Planned:" not in shown([plain, ours])
    near, far = (dataclasses.replace(ours, predicted_bytes=count) for count in (950_000_000, 800_000_000))
    text = " ".join(shown([plain, near, dataclasses.replace(far, dtype="bf16")]).split())
    assert (
        "Planned: the measured peak is 1.05 to 1.25 of the predicted one (most in iwslt-50-50-128, bf16), at most "
        "10 % above it in 1 of 2." in text
    )


def test_a_wrong_row_is_red_and_has_no_speed(plain, ours) -> None:
    wrong = dataclasses.replace(ours, status="wrong", times={}, note="loss is 1.0e+00 from float64, more than allowed.")
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(report.on_screen([plain, wrong]))
    (line,) = [line for line in console.file.getvalue().splitlines() if "fused, gatewise" in line and "wrong" in line][
        :1
    ]
    assert "\x1b[1;31m" in line
    assert "16,000" not in console.file.getvalue()


def test_markdown_has_a_table_a_precision(plain, ours, refused) -> None:
    coarse = [dataclasses.replace(row, dtype="bf16") for row in (plain, ours)]
    text = report.markdown([plain, refused, ours, *coarse])
    assert text.count("| fused, gatewise | 16,000, 1.00 GB |") == 2
    assert text.count("| fused, nn.LSTM | refused |") == 1
    assert "**tf32**: samples/s" in text
    assert "- iwslt-50-50-128, bf16: fused, gatewise trains 16,000 samples/s, 6.2x plain PyTorch" in text
    assert "NVIDIA H200; PyTorch 2.9.0" in text


def test_report_has_every_row_whole(plain, ours, refused) -> None:
    text = report.report([plain, refused, ours])
    assert "| fused, gatewise | 40 (40-40) | 8 (8-8) | 3,200 | 16,000 | 6.25x | 128 | 1.00 | 1.00 |" in text
    assert text.startswith("# `gatewise bench nmt`\n")
    assert f"- `{ours.run.command}`\n" in text
    assert "| 4 (100) | 0.8 (100) | 1.0e-04 (2.0e-03) |" in text
    assert "- fused, nn.LSTM: refused. it is shy" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith(("| fused", "| plain", "| way | eager"))}
    assert len({width for width in widths if width > 5}) == 1


def test_the_newest_record_of_every_row(plain, ours) -> None:
    again = dataclasses.replace(ours, note="again")
    elsewhere = dataclasses.replace(ours, run=dataclasses.replace(ours.run, device="NVIDIA A100"))
    assert record.newest([ours, elsewhere, plain, again], "h200") == [again, plain]
    assert record.newest([ours, elsewhere]) == [elsewhere]
    with pytest.raises(ArgumentError, match=r"`--device` must be part of a recorded device's name: NVIDIA H200, got"):
        record.newest([plain], "tpu")


def test_the_shares_are_the_whole_peak(plain) -> None:
    assert sum(plain.shares().values()) == sum(plain.parts.values()) == 3_500_000_000
    assert dataclasses.replace(plain, parts={}).shares() == {}


# The picture of cells is drawn by the same functions.
@pytest.mark.exhaustive
def test_picture(plain, ours, largest, largest_plain, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = picture.draw([plain, ours, largest_plain, largest], tmp_path / "nmt")
    assert [file.name for file in files] == ["nmt.png", "nmt.svg"]
    first = files[1].read_bytes()
    assert picture.draw([plain, ours, largest_plain, largest], tmp_path / "nmt")[1].read_bytes() == first
    other = dataclasses.replace(ours, parts=ours.parts | {"attention": 0})
    assert picture.draw([plain, other, largest_plain, largest], tmp_path / "other")[1].read_bytes() != first
    with pytest.raises(ArgumentError, match="`--plot` must be drawn from at least one measured row"):
        picture.draw([dataclasses.replace(plain, times={})], tmp_path / "nmt")


def test_a_page(plain, ours, tmp_path: Path) -> None:
    for row in (plain, ours):
        records_of.append_line(dataclasses.asdict(row), tmp_path / "nmt.jsonl")
    shown = publication("nmt", tmp_path)
    assert shown.summary == report.markdown([plain, ours])
    assert shown.draw is not None
    assert "Memory of a training step by part" in shown.caption

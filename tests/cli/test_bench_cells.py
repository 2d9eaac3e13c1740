"""`gatewise bench cells` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from gatewise.benchmarks.cells import run
from gatewise.cli.bench import app
from gatewise.contract.errors import ArgumentError

QUICK = ["cells", "--quick", "--device", "cpu", "--seconds", "0"]
FEW = ["--cell", "gru", "--cell", "own_lstm", "--way", "gatewise.LSTM", "--way", "loop"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_and_its_report(tmp_path: Path) -> None:
    ran = call(*QUICK, *FEW, "--plot", "pictures/cells")
    assert ran.exit_code == 0
    assert "fp32, train step" in ran.stdout
    assert "Recorded in benchmarks/results/cells_quick.jsonl" in ran.stdout
    assert (tmp_path / "pictures" / "cells.png").is_file()
    rows = lines_of(tmp_path / "benchmarks" / "results" / "cells_quick.jsonl")
    assert [(each["cell"], each["case"], each["direction"]) for each in rows] == [
        (cell, case, direction)
        for case in ("tiny", "tiny_decode")
        for cell in ("gru", "own_lstm")
        for direction in ("train", "inference")
    ]
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark: cells_quick -->\n<!-- /benchmark: cells_quick -->\n")
    assert call("report", "cells_quick", "--into", "page.md", "--plot", "docs/cells").exit_code == 0
    assert "| own_lstm | 2 |" in page.read_text()
    assert "as fast as what PyTorch offers](docs/cells.svg)" in page.read_text()
    report = (tmp_path / "benchmarks" / "reports" / "cells_quick.md").read_text()
    assert report.startswith("# `gatewise bench cells`")
    with pytest.raises(ArgumentError, match=r"cells\.jsonl.*Run `gatewise bench cells` first"):
        call("report", "cells")


def test_options_choose_the_rows_the_ways_and_the_file(tmp_path: Path) -> None:
    options = ["--case", "tiny", "--dtype", "bf16", "--direction", "inference", "--record", "kept/mine.jsonl"]
    assert call(*QUICK, *FEW, *options).exit_code == 0
    rows = lines_of(tmp_path / "kept" / "mine.jsonl")
    assert [(each["cell"], each["case"], each["dtype"], each["direction"]) for each in rows] == [
        (cell, "tiny", "bf16", "inference") for cell in ("gru", "own_lstm")
    ]
    assert {way for each in rows for way in each["ways"]} == {"gatewise", "gatewise.LSTM", "loop"}


def test_a_wrong_result_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gatewise.benchmarks.cells.row._errors", lambda found, truth: dict.fromkeys(found, float("nan"))
    )
    ran = call(*QUICK, *FEW, "--case", "tiny")
    assert ran.exit_code == 1
    assert "gatewise: wrong." in ran.stdout


def test_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = run._measured

    def impatient(settings, values, layer, precision, training, compilations):
        if not training:
            raise KeyboardInterrupt
        return measured(settings, values, layer, precision, training, compilations)

    monkeypatch.setattr(run, "_measured", impatient)
    ran = call(*QUICK, *FEW)
    assert ran.exit_code == 130
    assert "Interrupted: these are the rows that were finished." in ran.stdout
    (line,) = lines_of(tmp_path / "benchmarks" / "results" / "cells_quick.jsonl")
    assert (line["cell"], line["case"], line["direction"]) == ("gru", "tiny", "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cell", "lstn"], "`--cell` must be one of lstm, gru, .*, got 'lstn'"),
        (["--case", "huge"], "`--case` must be one of tiny, tiny_decode, got 'huge'"),
        (["--dtype", "fp8"], "`--dtype` must be one of bf16, fp16, tf32, fp32, got 'fp8'"),
        (["--direction", "backward"], "`--direction` must be train, inference or both, got 'backward'"),
        (["--way", "fast"], "`--way` must be one of resets, weight-dropout, .*, got 'fast'"),
        (["--seconds", "-1"], "`--seconds` must be at least 0, got -1"),
        (["--device", "tpu"], "`--device` must be cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(*QUICK, *options)

"""`gatewise bench lstm` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gatewise.benchmarks.lstm import grid
from gatewise.cli.bench import app
from gatewise.contract.errors import ArgumentError

QUICK = ["lstm", "--quick", "--device", "cpu", "--seconds", "0"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("pictures_are_not_drawn")
def test_a_run_and_its_report(tmp_path: Path) -> None:
    ran = call(*QUICK, "--plot", "pictures/lstm")
    assert ran.exit_code == 0
    assert "fp32, train step" in ran.stdout
    assert "geometric means" in ran.stdout
    assert "tiny_stack_ragged: " in ran.stdout
    assert (tmp_path / "pictures" / "lstm.png").is_file()
    assert (tmp_path / "pictures" / "lstm.svg").is_file()
    assert len(lines_of(tmp_path / "benchmarks" / "results" / "lstm_quick.jsonl")) == 8
    page = tmp_path / "README.md"
    page.write_text("<!-- benchmark: lstm_quick -->\n<!-- /benchmark: lstm_quick -->\n")
    assert call("report", "lstm_quick", "--into", "README.md", "--plot", "docs/lstm").exit_code == 0
    assert "| train step, from Python |" in page.read_text()
    assert "torch.nn.LSTM, by size](docs/lstm.svg)" in page.read_text()
    assert "## fp32, inference" in (tmp_path / "benchmarks" / "reports" / "lstm_quick.md").read_text()
    assert (tmp_path / "docs" / "lstm.svg").is_file()
    assert call("report", "lstm_quick", "--into", "README.md").exit_code == 0
    assert "![" not in page.read_text()
    assert (tmp_path / "benchmarks" / "reports" / "lstm_quick.png").is_file()


# LSTMs are measured by the same code.
@pytest.mark.exhaustive
@pytest.mark.usefixtures("pictures_are_not_drawn")
def test_a_run_of_grus_and_its_report(tmp_path: Path) -> None:
    ran = call("gru", *QUICK[1:], "--case", "tiny", "--case", "tiny_stack_ragged", "--plot", "gru")
    assert ran.exit_code == 0
    assert "times as fast as nn.GRU" in " ".join(ran.stdout.split())
    rows = lines_of(tmp_path / "benchmarks" / "results" / "gru_quick.jsonl")
    assert [(row["benchmark"], row["cell"], row["status"]) for row in rows] == [("gru_quick", "gru", "measured")] * 4
    page = tmp_path / "README.md"
    page.write_text("<!-- benchmark: gru_quick -->\n<!-- /benchmark: gru_quick -->\n")
    assert call("report", "gru_quick", "--into", "README.md", "--plot", "docs/gru").exit_code == 0
    assert "Times as fast as `torch.nn.GRU`" in page.read_text()
    assert "torch.nn.GRU, by size](docs/gru.svg)" in page.read_text()
    report = (tmp_path / "benchmarks" / "reports" / "gru_quick.md").read_text()
    assert report.startswith("# `gatewise bench gru`")
    assert "| nn.GRU: eager |" in report
    assert "nn.LSTM" not in report + page.read_text()
    with pytest.raises(ArgumentError, match=r"gru\.jsonl.*Run `gatewise bench gru` first"):
        call("report", "gru")


def test_options_choose_the_rows_and_the_file(tmp_path: Path) -> None:
    options = ["--case", "tiny", "--case", "tiny_decode", "--dtype", "bf16", "--direction", "inference"]
    assert call(*QUICK, *options, "--kernel", "eager", "--record", "kept/mine.jsonl").exit_code == 0
    assert call(*QUICK, *options, "--kernel", "aten", "--record", "kept/mine.jsonl").exit_code == 0
    rows = lines_of(tmp_path / "kept" / "mine.jsonl")
    assert [(row["case"], row["dtype"], row["direction"], row["kernel"]) for row in rows] == [
        (case, "bf16", "inference", kernel) for kernel in ("eager", "aten") for case in ("tiny", "tiny_decode")
    ]


@pytest.mark.usefixtures("pictures_are_not_drawn")
def test_a_picture_of_inference_alone(tmp_path: Path) -> None:
    assert call(*QUICK, "--case", "tiny", "--direction", "inference", "--plot", "lstm").exit_code == 0
    assert "Drawn in lstm.png and lstm.svg" in call(*QUICK, "--case", "tiny", "--plot", "lstm").stdout


def test_a_trial_is_not_taken_for_a_figure() -> None:
    assert call(*QUICK, "--case", "tiny").exit_code == 0
    with pytest.raises(ArgumentError, match=r"lstm\.jsonl.*Run `gatewise bench lstm` first"):
        call("report", "lstm")


def test_a_refused_kernel_is_no_failure() -> None:
    ran = call(*QUICK, "--kernel", "cudnn", "--plot", "lstm")
    assert ran.exit_code == 0
    assert "tiny, tiny_stack, tiny_stack_ragged, tiny_decode: refused." in " ".join(ran.stdout.split())


def test_a_wrong_result_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid.agreement, "errors", lambda found, exact: dict.fromkeys(found, float("nan")))
    ran = call(*QUICK, "--case", "tiny")
    assert ran.exit_code == 1
    assert "tiny: wrong." in ran.stdout


def test_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows_of = grid._Cell.rows

    def impatient(cell, precision, direction, products):
        if direction == "inference":
            raise KeyboardInterrupt
        return rows_of(cell, precision, direction, products)

    monkeypatch.setattr(grid._Cell, "rows", impatient)
    ran = call(*QUICK)
    assert ran.exit_code == 130
    assert "Interrupted: these are the rows that were finished." in ran.stdout
    (row,) = lines_of(tmp_path / "benchmarks" / "results" / "lstm_quick.jsonl")
    assert (row["case"], row["direction"]) == ("tiny", "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "huge"], "`--case` must be one of tiny, .*, got 'huge'"),
        (["--dtype", "fp8"], "`--dtype` must be one of bf16, fp16, tf32, fp32, got 'fp8'"),
        (["--dtype", "tf32"], "`--dtype` must be other than tf32 on a CPU"),
        (["--direction", "backward"], "`--direction` must be train, inference or both, got 'backward'"),
        (["--kernel", "fast"], "`--kernel` must be one of auto, .*, got 'fast'"),
        (["--seconds", "-1"], "`--seconds` must be at least 0, got -1"),
        (["--device", "tpu"], "`--device` must be cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(*QUICK, *options)

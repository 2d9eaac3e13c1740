"""`gatewise bench nmt` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gatewise.benchmarks.nmt import side
from gatewise.cli.bench import app
from gatewise.contract.errors import ArgumentError

QUICK = ["nmt", "--quick", "--device", "cpu", "--seconds", "0", "--way", "reference, gatewise"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("pictures_are_not_drawn")
def test_a_run_and_its_report(tmp_path: Path) -> None:
    ran = call(*QUICK, "--case", "tiny-6-5-4", "--loss", "3.9", "--plot", "trained")
    assert ran.exit_code == 0
    assert "tiny-6-5-4, fp32, until loss 3.9" in ran.stdout
    assert (tmp_path / "trained.png").is_file()
    rows = lines(tmp_path / "benchmarks" / "results" / "nmt_quick.jsonl")
    assert [row["way"] for row in rows] == ["plain PyTorch", "reference, gatewise"]
    assert all(row["steps_to_loss"]["eager"] == 5 for row in rows)
    page = tmp_path / "README.md"
    page.write_text("<!-- benchmark: nmt_quick -->\n<!-- /benchmark: nmt_quick -->\n")
    assert call("report", "nmt_quick", "--into", "README.md", "--plot=docs/nmt").exit_code == 0
    assert "| plain PyTorch |" in page.read_text()
    assert "](docs/nmt.svg)" in page.read_text()
    assert "| error (allowed) |" in (tmp_path / "benchmarks" / "reports" / "nmt_quick.md").read_text()


# A named case runs in the same way.
@pytest.mark.exhaustive
def test_every_case_runs_without_naming_one(tmp_path: Path) -> None:
    assert call(*QUICK).exit_code == 0
    rows = lines(tmp_path / "benchmarks" / "results" / "nmt_quick.jsonl")
    assert [row["case"] for row in rows] == ["tiny-6-5-4"] * 2 + ["tiny-best-6-5-4"] * 2
    assert all(row["loss"] is None for row in rows)


def test_a_wrong_way_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    made = side.new_model

    def louder(way, case, device):
        model = made(way, case, device)
        if not way.plain:
            model.attention.register_forward_hook(lambda layer, inputs, output: output * 1.01)
            model.start.register_forward_hook(lambda layer, inputs, output: output * 1.01)
        return model

    monkeypatch.setattr(side, "new_model", louder)
    ran = call(*QUICK, "--case", "tiny-6-5-4")
    assert ran.exit_code == 1
    assert "reference, gatewise: wrong." in ran.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "huge"], "`--case` must be one of tiny-6-5-4, tiny-best-6-5-4, got 'huge'"),
        (["--way", "magic"], "`--way` must be part of one of: 'plain PyTorch', 'reference, nn.LSTM', .*, got 'magic'"),
        (["--dtype", "fp16"], "`--dtype` must be one of tf32, bf16, fp32, got 'fp16'"),
        (["--dtype", "tf32"], "`--dtype` must be other than tf32 on a CPU, which has no TF32, got 'tf32'"),
        (
            ["--memory-budget", "8GB"],
            "`--memory-budget` must be none on a CPU, whose memory PyTorch does not count, got '8GB'",
        ),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(*QUICK, *options)

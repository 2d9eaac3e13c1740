"""`gatewise bench` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gatewise.benchmarks import rivals
from gatewise.benchmarks.rivals import Way
from gatewise.cli.bench import app
from gatewise.contract.errors import ArgumentError

QUICK = ["lm", "--quick", "--device", "cpu", "--runs", "1"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_a_plot_in_an_unknown_format_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`--plot` must be a \.png, \.svg or \.pdf file, got lm\.gif"):
        call(*QUICK, "--plot", "lm.gif")
    assert not any(tmp_path.iterdir())


def test_a_run_and_its_report(tmp_path: Path) -> None:
    ran = call(*QUICK, "--way", "nn.LSTM", "--dropout", "0.1", "--vocabulary", "30", "--plot", "lm.png")
    assert ran.exit_code == 0
    assert "30 words, fp32" in ran.stdout
    assert (tmp_path / "lm.png").is_file()
    lines = (tmp_path / "benchmarks" / "results" / "lm_quick.jsonl").read_text().splitlines()
    assert [json.loads(line)["settings"]["dropout"] for line in lines] == [0.1] * 4
    page = tmp_path / "README.md"
    page.write_text("<!-- benchmark: lm_quick -->\n<!-- /benchmark: lm_quick -->\n")
    assert call("report", "lm_quick", "--into", "README.md").exit_code == 0
    assert "| nn.LSTMCell loop |" in page.read_text()
    assert "| error (allowed) |" in (tmp_path / "benchmarks" / "reports" / "lm_quick.md").read_text()
    assert (tmp_path / "benchmarks" / "reports" / "lm_quick.svg").is_file()


def test_a_trial_is_not_taken_for_a_figure() -> None:
    assert call(*QUICK, "--way", "nn.LSTMCell").exit_code == 0
    with pytest.raises(ArgumentError, match=r"lm\.jsonl"):
        call("report")


def test_a_wrong_way_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(rivals.CellLoop):
        def forward(self, x, state):
            return super().forward(2 * x, state)

    monkeypatch.setattr(rivals, "ways", lambda: [Way("doubled", Doubled)])
    ran = call(*QUICK)
    assert ran.exit_code == 1
    assert "doubled: wrong." in ran.stdout
    assert "words/s" in ran.stdout


def test_a_way_that_stops_learning_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose first calls, which are compared with float64, are correct."""

    class Tired(rivals.CellLoop):
        calls = 0

        def forward(self, x, state):
            self.calls += 1
            y, state = super().forward(x, state)
            return (y if self.calls < 4 else y.detach() + 0.0 * y), state

    monkeypatch.setattr(rivals, "ways", lambda: [Way("tired", Tired)])
    ran = call(*QUICK)
    assert ran.exit_code == 1
    assert "tired: wrong. after 4 steps of training the loss is" in " ".join(ran.stdout.split())
    record = json.loads(Path("benchmarks/results/lm_quick.jsonl").read_text())
    assert (record["status"], record["words_per_second"]) == ("wrong", None)


def test_calls_and_runs_are_what_is_recorded(tmp_path: Path) -> None:
    assert call(*QUICK[:-2], "--runs", "2", "--calls", "3", "--way", "nn.LSTMCell").exit_code == 0
    (line,) = (tmp_path / "benchmarks" / "results" / "lm_quick.jsonl").read_text().splitlines()
    assert (json.loads(line)["runs"], json.loads(line)["settings"]["steps_a_sample"]) == (2, 3)


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(rivals.CellLoop):
        def forward(self, x, state):
            raise KeyboardInterrupt

    ways = [way for way in rivals.ways() if way.kernel == "cudnn"] + [Way("impatient", Impatient)]
    monkeypatch.setattr(rivals, "ways", lambda: ways)
    ran = call(*QUICK)
    assert ran.exit_code == 130
    assert "gatewise cudnn: refused." in ran.stdout
    assert "Interrupted: these are the rows that were finished." in ran.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "huge"], "`--size` must be one of small, medium, large, got 'huge'"),
        (["--dropout", "1"], r"`--dropout` must be a probability in \[0, 1\), got 1"),
        (["--vocabulary", "1"], "`--vocabulary` must be at least 2 words, got 1"),
        (["--device", "tpu"], "`--device` must be cpu, cuda or cuda:N, got 'tpu'"),
        (
            ["--device", "cuda:99"],
            "`--device` must be one that this machine has, got 'cuda:99'. (No GPU was|The GPUs here)",
        ),
        (["--device", "mps"], "`--device` must be cpu, cuda or cuda:N, got 'mps'"),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(*QUICK, *options)


def test_a_benchmark_without_a_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError,
        match="`benchmark` must be lm, lstm, gru, cells, nmt, models, attention, scale or quality, got 'systemml'",
    ):
        call("report", "systemml", "--results", str(tmp_path))

"""The run of the benchmark of models, and `gatewise bench models` from the outside."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from gatewise.benchmarks.models import agreement, run
from gatewise.benchmarks.models.agreement import Agreement
from gatewise.benchmarks.models.cases import TINY_CASES
from gatewise.benchmarks.models.record import LAYERS, STEP, ModelRecord
from gatewise.benchmarks.models.ways import Way
from gatewise.cli.bench import app
from gatewise.contract.errors import ArgumentError
from tests.pairwise import exhaustive

SPEECH = next(workload for workload in TINY_CASES if workload.inference)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str):
    arguments = ("models", "--quick", "--device", "cpu", "--seconds", "0", *arguments)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def records() -> list[ModelRecord]:
    lines = Path("benchmarks/results/models_quick.jsonl").read_text().splitlines()
    return [ModelRecord.from_line(line) for line in lines]


def test_a_run_and_its_report(tmp_path: Path) -> None:
    ran = call("--case", "ppo", "--steps", "26", "--plot", "pictures/models")
    assert ran.exit_code == 0
    (record,) = records()
    assert list(record.ways) == ["before", "one line", "resets="]
    assert [way.status for way in record.ways.values()] == ["measured"] * 3
    assert [way.calls for way in record.ways.values()] == [12, 12, 1]
    for way in record.ways.values():
        assert way.times[STEP].runs >= 3
        assert way.times[LAYERS].median > 0
        assert way.note == "No CUDA graph on a CPU"
    assert record.settings["hidden_size"] == 16
    assert (tmp_path / "pictures" / "models.svg").is_file()
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark: models_quick -->\n<!-- /benchmark: models_quick -->\n")
    reported = CliRunner().invoke(app, ["report", "models_quick", "--into", "page.md"], catch_exceptions=False)
    assert reported.exit_code == 0
    assert "| ppo-tiny | before |" in page.read_text()
    assert "gatewise bench models" in Path("benchmarks/reports/models_quick.md").read_text()


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare no loss curves, which takes most of the time of a run."""
    monkeypatch.setattr(agreement, "losses", lambda *given, **options: [])
    monkeypatch.setattr(agreement, "same_curve", lambda ours, theirs: Agreement(0.0, 0.0))


# A run of a model and its report are tested below.
@pytest.mark.exhaustive
@pytest.mark.usefixtures("untrained")
def test_training_and_inference(observer) -> None:
    workload = dataclasses.replace(SPEECH, program=dataclasses.replace(SPEECH.program, time=4, frames=4))
    settings = run.Settings("models_quick", (workload,), torch.device("cpu"), steps=1, seconds=0.0, graphs=False)
    written = []
    outcome = run.run(settings, observer, written.append)
    assert outcome.records == written
    assert [record.direction for record in written] == ["train", "inference"]
    assert [record.status for record in written] == ["measured", "measured"]
    assert all(way.note == "" for record in written for way in record.ways.values())


def test_a_way_with_another_loss_curve_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = agreement.same_curve

    def strict(ours, theirs):
        found = compared(ours, theirs)
        return found if ours is theirs[0] else dataclasses.replace(found, note="the loss is another one")

    monkeypatch.setattr(agreement, "same_curve", strict)
    ran = call("--case", "cuda")
    assert ran.exit_code == 1
    assert "wrong: the loss is another one" in ran.stdout
    before, after = records()[0].ways.values()
    assert (before.status, after.status) == ("measured", "wrong")
    assert after.times == {}


@pytest.mark.usefixtures("untrained")
def test_a_way_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Way.model

    def failing(self, workload, seed, device, *, shorter=False):
        if self.accelerated:
            raise RuntimeError("out of memory\nmore")
        return made(self, workload, seed, device, shorter=shorter)

    monkeypatch.setattr(Way, "model", failing)
    assert call("--case", "flood").exit_code == 1
    before, after = records()[0].ways.values()
    assert before.status == "measured"
    assert (after.status, after.note) == ("failed", "out of memory")


# `make test` has a way that fails before.
@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("alone", exhaustive(False, True), ids=["step", "layers"])
def test_a_way_that_fails_while_it_is_timed_leaves_the_others(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    warmed = run._Table._warm

    def failing(self, way, found):
        measured, step, layers = warmed(self, way, found)
        if way.name != "one line":
            return measured, step, layers
        return (measured, step, full) if alone else (measured, full, layers)

    def full():
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(run._Table, "_warm", failing)
    assert call("--case", "ppo").exit_code == 1
    before, after, resets = records()[0].ways.values()
    assert (before.status, resets.status) == ("measured", "measured")
    assert before.times.keys() == resets.times.keys() == {STEP, LAYERS}
    assert (after.status, after.note, after.times) == ("failed", "out of memory", {})


def test_an_interrupted_run_has_written_what_is_complete(observer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(agreement, "curves", interrupted)
    settings = run.Settings("models_quick", TINY_CASES[:1], torch.device("cpu"))
    assert run.run(settings, observer, lambda record: None).interrupted


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"`--case` must be part of one of: flood-tiny, .* got 'resnet'"):
        call("--case", "resnet")


@pytest.mark.usefixtures("untrained")
def test_a_record_is_read_as_it_was_written() -> None:
    assert call("--case", "cuda", "--no-graphs").exit_code == 0
    (line,) = Path("benchmarks/results/models_quick.jsonl").read_text().splitlines()
    assert json.loads(json.dumps(dataclasses.asdict(ModelRecord.from_line(line)))) == json.loads(line)

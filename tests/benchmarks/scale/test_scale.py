"""`gatewise bench scale`: every row on one and on two processes, its records and reports, and processes that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

pytest.importorskip("typer")

import torch
from typer.testing import CliRunner

from gatewise.benchmarks import record
from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.publication import publication
from gatewise.benchmarks.record import MEASURED, WRONG, Record, Run
from gatewise.benchmarks.scale import launch, picture, report, worker
from gatewise.benchmarks.scale.language_model import LanguageModelTraining
from gatewise.benchmarks.scale.launch import WorkersFailed, answers
from gatewise.benchmarks.scale.training import TRAININGS
from gatewise.benchmarks.scale.translation import QUICK_TRANSLATION, TranslationTraining
from gatewise.benchmarks.scale.worker import Task
from gatewise.cli.bench import app
from gatewise.contract.errors import ArgumentError
from gatewise.selection.timing import Timing
from gatewise.training.processes import Processes
from tests.programs import Agent

TINY = LanguageModelCase("tiny", 8, dropout=0.5, clip_norm=5.0, initial_scale=0.3, time=4, batch=1)
TASK = Task(
    "lm",
    LanguageModelTraining(TINY, 20),
    (3,),
    ("nn.LSTM, DDP", "gatewise train lm"),
    "fp32",
    "cpu",
    runs=2,
    calls=1,
    answers="",
)
ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str):
    return CliRunner().invoke(app, ["scale", *arguments], catch_exceptions=False)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_module(name: str, *words: str) -> None:
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start torchrun and its processes fast."""

    def start(command: list[str], stdout: IO[str], **_: object) -> Agent:
        place = command.index("-m", 3)
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        return Agent(command[3:place], stdout.name, run_module, *command[place + 1 :])

    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))


@pytest.mark.usefixtures("forked")
def test_a_run_on_one_and_two_processes_and_its_report(tmp_path: Path) -> None:
    ran = call("--quick", "--device", "cpu", "--batch", "3", "--plot", "pictures/scale")
    assert ran.exit_code == 0, ran.stdout
    assert (tmp_path / "pictures" / "scale.svg").is_file()
    rows = lines_of(tmp_path / "benchmarks/results/scale_quick.jsonl")
    found = [(each["settings"]["processes"], each["settings"]["batch"], each["way"]) for each in rows]
    assert found == [(count, 3, way.name) for count in (1, 2) for way in TRAININGS["lm"].ways.default]
    for each in rows:
        assert each["status"] == MEASURED
        assert each["runs"] == 3
        assert each["run"]["device"].endswith(", 1 threads")
        words = each["settings"]["processes"] * each["settings"]["batch"] * each["settings"]["time"]
        assert each["words_per_second"] == pytest.approx(words / each["median"])
        assert each["note"] == "the loss of 8 steps of training is that of nn.LSTM, DDP"
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark: scale_quick -->\n<!-- /benchmark: scale_quick -->\n")
    reported = CliRunner().invoke(app, ["report", "scale_quick", "--into", "page.md"], catch_exceptions=False)
    assert reported.exit_code == 0
    assert "B 3 each, fp32**, words/s (efficiency) by the number of processes:" in page.read_text()
    assert (tmp_path / "benchmarks/reports/scale_quick.md").read_text().startswith("# `gatewise bench scale`")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("count", "names"),
    [
        pytest.param(1, [], marks=pytest.mark.exhaustive),
        pytest.param(2, [], marks=pytest.mark.exhaustive),
        # The rows that send bfloat16 are compared with others, which takes as long as these.
        pytest.param(2, ["gatewise train nmt", "gatewise train nmt, rows"], marks=pytest.mark.exhaustive),
        # `make test` measures this in its own process, below.
        pytest.param(1, ["gatewise train nmt"], marks=pytest.mark.exhaustive),
    ],
    ids=["one", "two", "two, named", "one, named"],
)
def test_translation_on_one_or_two_processes_and_its_report(tmp_path: Path, count: int, names: list[str]) -> None:
    options = ["--processes", str(count), "--batch", "3", "--runs", "1"]
    options += [word for name in names for word in ("--way", name)]
    ran = call("--quick", "--device", "cpu", "--model", "nmt", *options)
    assert ran.exit_code == 0, ran.stdout
    rows = lines_of(tmp_path / "benchmarks/results/scale_quick.jsonl")
    ways = TRAININGS["nmt"].ways.named(names)
    assert [(each["settings"]["processes"], each["way"]) for each in rows] == [(count, way.name) for way in ways]
    for each, way in zip(rows, ways, strict=True):
        assert (each["status"], each["settings"]["model"], each["settings"]["batch"]) == (MEASURED, "nmt", 3)
        words = count * 3 * QUICK_TRANSLATION.target
        assert each["words_per_second"] == pytest.approx(words / each["median"])
        rounded = " in bfloat16" if way.bfloat16 else ""
        assert each["note"] == f"the loss of 8 steps of training is that of plain PyTorch, DDP{rounded}"
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark: scale_quick -->\n<!-- /benchmark: scale_quick -->\n")
    reported = CliRunner().invoke(app, ["report", "scale_quick", "--into", "page.md"], catch_exceptions=False)
    assert reported.exit_code == 0
    assert "B 3 each, fp32**, target words/s (efficiency) by the number of processes:" in page.read_text()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("model", ["lm", "nmt"])
def test_all_other_rows_have_the_losses_of_the_first(tmp_path: Path, model: str) -> None:
    sharded = hasattr(torch.cpu.Stream, "record_event")  # PyTorch 2.6 cannot divide a model between CPUs
    others = [way for way in TRAININGS[model].ways.others if sharded or "fully_shard" not in way.name]
    options = [word for way in others for word in ("--way", way.name)]
    ran = call("--quick", "--device", "cpu", "--model", model, "--processes", "2", "--runs", "1", *options)
    assert ran.exit_code == 0, ran.stdout
    rows = lines_of(tmp_path / "benchmarks/results/scale_quick.jsonl")
    assert [(each["way"], each["status"]) for each in rows] == [(way.name, MEASURED) for way in others]


class Answers(list):
    """A list to which the worker writes its answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr(worker, "_answer", lambda task, processes, fields: self.append(fields))

    def results(self):
        return {each["way"]: each for each in self if "way" in each}


def test_each_row_is_announced_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Answers(monkeypatch)
    worker.measure(dataclasses.replace(TASK, batches=(2, 3)), ALONE)
    assert [each.get("begins") for each in found] == [TASK.ways[0], None, TASK.ways[1], None] * 2
    assert [each["batch"] for each in found if "way" in each] == [2, 2, 3, 3]
    for answer in (each for each in found if "way" in each):
        assert answer["status"] == MEASURED
        assert len(answer["samples"]) == 2
        assert min(answer["samples"]) > 0


# The language model is measured in the same way.
@pytest.mark.exhaustive
def test_translation_is_measured_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found, own = Answers(monkeypatch), TranslationTraining(QUICK_TRANSLATION)
    ways = ("gatewise train nmt",)
    worker.measure(dataclasses.replace(TASK, model="nmt", training=own, ways=ways, runs=1), ALONE)
    (answer,) = found.results().values()
    assert (answer["status"], len(answer["samples"])) == (MEASURED, 1)
    assert answer["note"] == "the loss of 8 steps of training is that of plain PyTorch, DDP"


def test_a_row_with_other_losses_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found, losses = Answers(monkeypatch), worker._Rows._losses

    def different(rows, way, nudge=None, precision=None):
        curve = losses(rows, way, nudge, precision)
        return curve if way.name == "nn.LSTM, DDP" else (*curve[:-1], 1.5 * curve[-1])

    monkeypatch.setattr(worker._Rows, "_losses", different)
    worker.measure(TASK, ALONE)
    first, second = found.results().values()
    assert first["status"] == MEASURED
    assert second["status"] == WRONG
    assert second["note"].startswith("after 7 steps of training the loss is")
    assert "samples" not in second


def test_a_row_whose_processes_differ_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Answers(monkeypatch)
    monkeypatch.setattr(Processes, "all_gather", lambda self, value: [value, "another"])
    worker.measure(TASK, ALONE)
    for answer in found.results().values():
        assert (answer["status"], answer["note"]) == (WRONG, "the weights of the processes differ")


NOT_FINITE = "the loss of a step of training with dropout in process {} is not finite"


def test_a_row_that_becomes_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found, step_of = Answers(monkeypatch), LanguageModelTraining.step

    @contextlib.contextmanager
    def diverging(*arguments, dropout):
        with step_of(*arguments, dropout=dropout) as (step, model):
            yield (lambda batch, state: (step(batch, state)[0] * math.nan, state)) if dropout else step, model

    monkeypatch.setattr(LanguageModelTraining, "step", diverging)
    worker.measure(TASK, ALONE)
    for answer in found.results().values():
        assert (answer["status"], answer["note"]) == (WRONG, NOT_FINITE.format(0))


DIVERGING = """
import contextlib, math
from gatewise.benchmarks.scale import worker
from gatewise.benchmarks.scale.language_model import LanguageModelTraining

step_of = LanguageModelTraining.step

@contextlib.contextmanager
def diverging(training, way, start, precision, processes, *, dropout):
    with step_of(training, way, start, precision, processes, dropout=dropout) as (step, model):
        bad = dropout and processes.rank == 1
        yield (lambda batch, state: (step(batch, state)[0] * math.nan, state)) if bad else step, model

LanguageModelTraining.step = diverging
worker.main()
"""


# Rows that are wrong are tested in one process.
@pytest.mark.exhaustive
@pytest.mark.usefixtures("forked")
def test_a_row_that_becomes_nan_in_one_process_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "diverging_worker.py").write_text(DIVERGING)
    monkeypatch.syspath_prepend(tmp_path)
    found = [each for each in answers(TASK, 2, 60.0, "diverging_worker") if "way" in each]
    assert [each["way"] for each in found] == list(TASK.ways)
    for answer in found:
        assert (answer["status"], answer["note"]) == (WRONG, NOT_FINITE.format(1))


FAILING = """
import json, os, signal, sys, time
from gatewise.training.processes import join_processes
from gatewise.benchmarks.scale import worker

def measure(task, processes):
    worker._answer(task, processes, {"begins": "this row", "batch": 3})
    processes.barrier()
    if processes.rank == processes.count - 1:
        ACTION
    time.sleep(600)

worker.measure = measure
worker.main()
"""


@pytest.mark.parametrize(
    ("action", "limit", "message"),
    [
        (
            "raise ValueError('the reason')",
            60,
            "one of 2 processes failed while measuring 'this row', batch 3: the reason",
        ),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            60,
            "2 processes ended with status 1 while measuring 'this row'",
            marks=pytest.mark.exhaustive,
        ),
        ("time.sleep(600)", 60, "2 processes gave no answer for 60 seconds while measuring 'this row', batch 3. Give"),
    ],
    ids=["fails", "is killed", "hangs"],
)
# torchrun's command itself is started by a test of `gatewise train lm`, too.
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_processes_that_fail_end_the_benchmark_in_a_sentence(
    tmp_path, monkeypatch, request, action, limit, message, fast
) -> None:
    (tmp_path / "failing_worker.py").write_text(FAILING.replace("ACTION", action))
    if fast:
        request.getfixturevalue("forked")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began, coming = time.monotonic(), answers(TASK, 2, limit, "failing_worker")
    found = [next(coming)]
    if "sleep" in action:  # the limit passes at once
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + limit, sleep=time.sleep)
        monkeypatch.setattr(launch, "time", later)
    with pytest.raises(WorkersFailed) as failure:
        next(coming)
    assert message in str(failure.value)
    assert found == [{"begins": "this row", "batch": 3}]
    assert time.monotonic() - began < 110


def recorded(
    processes: int, batch: int, words_per_second: float | None, way: str = "nn.LSTM, DDP", **others: object
) -> Record:
    settings = {**dataclasses.asdict(TINY), "batch": batch, "vocabulary": 20, "processes": processes, **others}
    run = Run("2026-01-01T00:00:00+00:00", "gatewise bench scale", "GPU", "1", "3", "2", "13", 0, "0", "c", False)
    made = Record("scale", "tiny", settings, way, None, "fp32", WRONG, "because", run)
    if words_per_second is None:
        return made
    words = processes * batch * TINY.time
    return made.timed(Timing(words / words_per_second, 0.1, 0.2, 3), words)


def translated(processes: int, batch: int, words_per_second: float) -> Record:
    training = TranslationTraining(QUICK_TRANSLATION).with_batch(batch)
    settings = {"model": "nmt", **training.settings, "processes": processes}
    made = dataclasses.replace(
        recorded(processes, batch, None), case=training.name, settings=settings, way="gatewise train nmt"
    )
    words = processes * training.words
    return made.timed(Timing(words / words_per_second, 0.1, 0.2, 3), words)


def test_each_model_has_tables_of_its_own() -> None:
    languages = [recorded(1, 20, 1000.0), recorded(2, 20, 1800.0, model="lm")]  # older records name no model
    translations = [translated(1, 4, 300.0), translated(2, 4, 480.0), translated(4, 4, 900.0)]
    records = [*translations, *languages]
    assert report.newest(records) == [*languages, *translations]
    shown = report.markdown(records)
    language, translation = shown.split("**quick (2 + 2 x 8, S 6, T 5, 400 words), B 4 each, fp32**, target words/s")
    assert "| way | 1 | 2 |\n|---|---:|---:|\n| nn.LSTM, DDP | 1,000 | 1,800 (90 %) |\n" in language
    assert "| way | 1 | 2 | 4 |" in translation
    assert "| gatewise train nmt | 300 | 480 (80 %) | 900 (75 %) |" in translation
    assert "clipping and SGD" in shown
    assert "clipping and Adam" in shown
    assert "Adam" not in report.markdown(languages)
    assert "SGD" not in report.markdown(translations)
    assert report.report(records).count("| quick (2 + 2 x 8") == 3


def test_a_row_that_the_benchmark_no_longer_has_is_left_out() -> None:
    former = dataclasses.replace(recorded(1, 20, 1000.0), way="gatewise train lm, apart")
    assert report.newest([former, recorded(1, 20, 900.0)]) == [recorded(1, 20, 900.0)]


def test_a_row_that_could_not_be_captured_says_so() -> None:
    row = dataclasses.replace(translated(2, 4, 300.0), note="its losses agree; no CUDA graph: the reason")
    assert "measured. its losses agree; no CUDA graph: the reason" in report.markdown([row])


def test_the_efficiency_is_that_over_as_many_times_one_process(tmp_path: Path) -> None:
    rows = [recorded(1, 20, 1000.0), recorded(2, 20, 1800.0), recorded(4, 20, None), recorded(2, 128, 5000.0)]
    shown = report.markdown(rows)
    assert "| nn.LSTM, DDP | 1,000 | 1,800 (90 %) | wrong |" in shown
    assert "| nn.LSTM, DDP |  | 5,000 |  |" in shown, "no efficiency without one process"
    assert "- nn.LSTM, DDP, tiny (2 x 8, T 4, 20 words), B 20 each, fp32, 4 processes: wrong. because" in shown
    newer = recorded(2, 20, 1900.0)
    for each in (*rows, newer):
        record.append_line(dataclasses.asdict(each), tmp_path / "scale.jsonl")
    published = publication("scale", tmp_path)
    assert "1,900 (95 %)" in published.summary
    assert "1,800" not in published.summary
    assert published.draw is not None


@pytest.mark.parametrize("setting", [{"vocabulary": 50}, {"dropout": 0.25}], ids=["shown", "not shown"])
def test_records_of_other_settings_are_in_tables_of_their_own(setting: dict[str, object]) -> None:
    records = [recorded(1, 20, 1000.0), recorded(1, 20, 400.0, **setting), recorded(2, 20, 800.0, **setting)]
    assert report.newest(records) == records
    tables = [list(row.values()) for row in report.rows(records).values()]
    assert tables == [records[:1], records[1:]]
    shown = report.markdown(records)
    assert "| nn.LSTM, DDP | 1,000 |  |" in shown
    assert "| nn.LSTM, DDP | 400 | 800 (100 %) |" in shown
    assert "(2 x 8, T 4, 20 words), B 20 each" in shown
    if "vocabulary" in setting:
        assert "(2 x 8, T 4, 50 words), B 20 each" in shown
    assert list(picture.drawable(records).values()) == [{1: 1.0, 2: 2.0}]


def test_the_newest_record_is_shown_whatever_the_number_of_steps_in_a_sample() -> None:
    calls = (1, 20, 1)
    records = [recorded(1, 20, 100.0 * (place + 1), steps_a_sample=count) for place, count in enumerate(calls)]
    for length in (1, 2, 3):
        assert report.newest(records[:length]) == [records[length - 1]]
        assert f"| nn.LSTM, DDP | {100 * length} |" in report.markdown(report.newest(records[:length]))


def test_nothing_is_drawn_without_one_process_and_several() -> None:
    with pytest.raises(ArgumentError, match="must be drawn from a row with one process and several"):
        picture.draw([recorded(2, 20, 1000.0)], Path("none"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--way", "nn.LSTM"], "`--way` must be one of: nn.LSTM, DDP; .*, got 'nn.LSTM'"),
        (["--size", "huge"], "`--size` must be one of small, medium, large, got 'huge'"),
        (["--dtype", "fp16"], "`--dtype` must be one of bf16-autocast, tf32, fp32, got 'fp16'"),
        (["--model", "mt"], "`--model` must be one of lm, nmt, got 'mt'"),
        (["--model", "nmt", "--size", "medium"], "`--size` must be one of small, large with --model nmt, got 'medium'"),
        (["--model", "nmt", "--way", "gatewise train lm"], "`--way` must be one of: plain PyTorch, DDP; .*, got 'gate"),
        (["--model", "nmt", "--vocabulary", "9"], "`--vocabulary` must be left out with --model nmt, got 9"),
        (["--device", "tpu"], "`--device` must be cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_bad_options(options: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call("--quick", *options)


@pytest.mark.parametrize(
    ("model", "yardstick"), [("lm", "nn.LSTM, DDP"), ("nmt", "plain PyTorch, DDP")], ids=["lm", "nmt"]
)
def test_the_default_rows_begin_with_the_yardstick(model: str, yardstick: str) -> None:
    ways, own = TRAININGS[model].ways, f"gatewise train {model}"
    assert ways.named([]) == ways.default
    assert ways.yardstick.name == yardstick
    assert [way.name for way in ways.named([own, own])] == [own]


@pytest.mark.parametrize("training", [LanguageModelTraining(TINY, 20), TranslationTraining(QUICK_TRANSLATION)])
def test_the_processes_read_the_task_of_the_command_line(training) -> None:
    task = dataclasses.replace(TASK, model=training.model, training=training)
    assert Task.from_line(json.dumps(dataclasses.asdict(task))) == task

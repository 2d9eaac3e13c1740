"""Cases are trained on every kind of layer from the same weights, and a wrong kernel is found."""

import dataclasses
import functools
import json

import pytest
import torch

from gatewise.benchmarks.trajectories.__main__ import main
from gatewise.benchmarks.trajectories.cases import CASES, Case
from gatewise.benchmarks.trajectories.run import run_case
from gatewise.benchmarks.trajectories.tasks import MODELS, batches
from gatewise.benchmarks.trajectories.train import train
from gatewise.kernels.eager import eager
from tests.programs import processes_that_start_fast

CPU = torch.device("cpu")
SMALL = Case("small", "classes", 7, 8, 12, rate=0.05, bidirectional=True)


def small(case):
    """Return a case with its task and options, and sizes for a test."""
    return dataclasses.replace(
        case, hidden=8, time=4, batch=3, projection=3 if case.projection else 0, processes=1, dtype="float32"
    )


def test_there_are_twelve_models_and_more_with_autocast_scaling_and_several_gpus():
    assert len(CASES) >= 12
    assert {case.task for case in CASES} == set(MODELS)
    assert any(case.scaled for case in CASES)
    assert any(case.processes == 2 for case in CASES)
    assert any(case.hidden % 8 == 4 and case.hidden > 1000 and case.autocast for case in CASES)


# `make test` runs one case of each task.
OF_TASKS = [*{case.task: case for case in reversed(CASES)}.values()]


@pytest.mark.parametrize(
    "case",
    [*(pytest.param(case, marks=() if case in OF_TASKS else pytest.mark.exhaustive) for case in CASES)],
    ids=lambda case: case.name,
)
def test_kinds_begin_with_the_loss_of_nn_lstm(case):
    case = dataclasses.replace(small(case), dropout=0.0, autocast="", scaled=False)
    ours, theirs = (train(case, kind, 3, 2, CPU) for kind in ("eager", "nn.LSTM"))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("task", MODELS)
def test_batches_are_the_same_for_a_seed(task):
    case = next(small(case) for case in CASES if case.task == task)
    first, again, other = (next(batches(case, seed, CPU)) for seed in (0, 0, 1))
    assert all(a is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.targets, other.targets)


once = functools.cache(train)


@pytest.fixture
def compared_with_one(monkeypatch):
    """Train nn.LSTM once for all tests, whatever kernel it is beside."""
    called = lambda case, kind, *given: (once if kind == "nn.LSTM" else train)(case, kind, *given)  # noqa: E731
    monkeypatch.setattr("gatewise.benchmarks.trajectories.run.train", called)


@pytest.mark.usefixtures("compared_with_one")
def test_a_right_kernel_passes_and_a_wrong_one_does_not(monkeypatch):
    rows = run_case(SMALL, ["eager", "persistent"], 75, CPU)
    assert [(row["kind"], bool(row["note"]), row["refused"]) for row in rows] == [
        ("nn.LSTM", False, False),
        ("eager", False, False),
        ("persistent", True, True),
    ]
    original = type(eager).forward

    def forgetful(self, problem, inputs):
        return original(self, problem, inputs._replace(x=inputs.x * 0))

    monkeypatch.setattr(type(eager), "forward", forgetful)
    (_, row) = run_case(SMALL, ["eager"], 75, CPU)
    assert "around step" in row["note"]


def test_two_processes_train_together(monkeypatch):
    processes_that_start_fast()  # determines the modules that the server imports
    forked = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr("gatewise.benchmarks.trajectories.train.spawn", forked)
    # With the same batch in both processes, the averaged gradients are those of one process.
    case = dataclasses.replace(SMALL, processes=2, batch=4)
    together, alone = train(case, "eager", 0, 3, CPU), train(dataclasses.replace(case, processes=1), "eager", 0, 3, CPU)
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    assert together[1:] != pytest.approx(alone[1:], rel=1e-5)  # the second process has batches of its own


@pytest.mark.usefixtures("compared_with_one")
def test_the_command_records_every_trajectory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gatewise.benchmarks.trajectories.__main__.CASES", (SMALL,))
    record = tmp_path / "trajectories.jsonl"
    given = ["--device", "cpu", "--steps", "75", "--kind", "eager", "--kind", "persistent", "--record", str(record)]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "within the spread" in said
    assert "refused" in said
    assert "1 models in" in said
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["nn.LSTM", "eager", "persistent"]
    assert len(rows[0]["losses"]) == 3


@pytest.mark.parametrize("given", [["--steps", "0"], ["--jobs", "0"], ["--case", "nobody"]])
def test_what_is_out_of_range_is_refused_by_name(given, capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *given])
    assert f"`{given[0]}` must be" in capsys.readouterr().err

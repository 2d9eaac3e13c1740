"""A replayed step trains like the step itself; in these tests a "replay" calls the function again."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from echo_model import ALONE, Batch, Diary, Echoes, echo_model, train
from several import Recorder
from test_resumption import StopAt, files_of, train_language_model
from torch import nn

from gatewise.training import TrainingOptions, graph
from gatewise.training.graph import LATER_WARMUPS, WARMUPS, ReplayedStep, refusal
from gatewise.training.optimizers import build_optimizer
from gatewise.training.processes import Processes
from gatewise.training.step import MeanLoss, Step


class Shifting(nn.Module):
    """A model whose state consists of its last two inputs, so that a part of the new state is a part of the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, batch, state):
        newest, older = state
        return (self.weight * (batch.x - older)).square().mean(), (batch.x.clone(), newest)


def trainer(model=None, *, recorder=None, remarks=None, weights=(), **options):
    """Return the step of an `EchoModel`, replayed if there is a recorder."""
    model = model or MeanLoss(echo_model(dropout=0.0))
    options = TrainingOptions(**({"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.0} | options))
    step = Step(model, build_optimizer(model.parameters(), options), options.clip, "float32", torch.device("cpu"))
    told = (remarks if remarks is not None else []).append
    return step if recorder is None else ReplayedStep(step, recorder, told, weights)


def run(step, batches):
    losses, state = [], None
    for batch in batches:
        loss, state = step(batch, state)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw"}, {"momentum": 0.9, "clip": 0.01}], ids=str)
def test_replays_have_the_losses_of_steps(options):
    batches = list(Echoes().windows())
    recorder, remarks = Recorder(), []
    assert run(trainer(recorder=recorder, remarks=remarks, **options), batches) == run(trainer(**options), batches)
    assert (recorder.records, recorder.replays) == (1, 20 - 1 - 3)  # the first has no state, three warm up
    assert remarks == ["steps are replayed as one CUDA graph"]


def test_gradients_of_the_last_step_stay_in_the_weights():
    """A real replay runs no Python code, so this one restores the weights' attributes."""
    batches, found = list(Echoes().windows()), []
    short = Batch(batches[3].x[:5], batches[3].y[:5])
    for recorder in (None, Recorder()):
        model = MeanLoss(echo_model(dropout=0.0))
        weights = list(model.parameters())

        def capture(work, weights=weights, recorder=recorder):
            replay = recorder(work)

            def silent():
                before = [weight.grad for weight in weights]
                replay()
                for weight, gradient in zip(weights, before, strict=True):
                    weight.grad = gradient

            return silent

        step = trainer(model, recorder=recorder and capture, weights=weights)
        run(step, batches)
        run(step, [short])
        run(step, batches)
        found.append([weight.grad.clone() for weight in weights])
    assert recorder.replays > 16
    for plain, replayed in zip(*found, strict=True):
        assert torch.equal(plain, replayed)


def test_a_shape_that_does_not_repeat_is_not_replayed():
    batches = list(Echoes().windows())
    short = Batch(batches[10].x[:5], batches[10].y[:5])
    recorder = Recorder()
    step, plain = trainer(recorder=recorder), trainer()
    for each in (step, plain):
        run(each, batches)
    assert run(step, [short]) == run(plain, [short])
    assert recorder.replays == 16
    assert run(step, batches) == run(plain, batches)
    assert (recorder.records, recorder.replays) == (1, 16 + 19)


def of_sizes(*sizes):
    """Return batches of these sizes; without dropout and state their order does not matter."""
    x = torch.randn(len(sizes), 8, 6, generator=torch.Generator().manual_seed(0))
    return [Batch(each[:size], -each[:size]) for each, size in zip(x, sizes, strict=True)]


class Stateless(nn.Linear):
    def forward(self, batch, state):
        return (super().forward(batch.x) - batch.y).square().mean(), None


def stateless():
    torch.manual_seed(0)
    return Stateless(6, 6)


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw"}], ids=str)
def test_every_shape_that_repeats_is_recorded(options):
    batches = of_sizes(*[8, 5, 3] * 5, 7, *[3, 8, 5] * 3)
    recorder, remarks = Recorder(), []
    found = run(trainer(stateless(), recorder=recorder, remarks=remarks, **options), batches)
    assert found == run(trainer(stateless(), **options), batches)
    assert (recorder.records, recorder.replays) == (3, 3 * (5 + 3 - WARMUPS))
    assert remarks == ["steps are replayed as one CUDA graph"]


@pytest.mark.parametrize("options", [{}, {"optimizer": "adamw"}], ids=str)
def test_a_shape_after_the_first_is_recorded_when_it_occurs_again(options):
    batches = of_sizes(*[8] * 5, 5, 3, 5, 4, 5, 3)
    recorder = Recorder()
    step = trainer(stateless(), recorder=recorder, **options)
    assert run(step, batches) == run(trainer(stateless(), **options), batches)
    assert (recorder.records, recorder.replays) == (3, (5 - WARMUPS) + (3 - LATER_WARMUPS) + (2 - LATER_WARMUPS))


def test_the_shapes_that_are_recorded_are_bounded(monkeypatch):
    monkeypatch.setattr(graph, "MOST_SHAPES", 2)
    batches = of_sizes(*[8, 5, 3, 4] * 6)
    recorder, remarks = Recorder(), []
    step = trainer(stateless(), recorder=recorder, remarks=remarks)
    assert run(step, batches) == run(trainer(stateless()), batches)
    assert (recorder.records, recorder.replays, step.shapes) == (2, 2 * 3, 2)
    assert remarks[1:] == ["2 shapes of batches are replayed as CUDA graphs; others run without one"]


def test_a_shape_that_cannot_be_recorded_leaves_the_others(monkeypatch):
    recorder, remarks = Recorder(), []

    def capture(work):
        recorder.refuses = "CUDA out of memory" if recorder.records == 2 else ""
        return recorder(work)

    batches = of_sizes(*[8, 5, 3, 4] * 6)
    step = trainer(stateless(), recorder=capture, remarks=remarks)
    assert run(step, batches) == run(trainer(stateless()), batches)
    assert (recorder.records, recorder.replays, step.shapes) == (3, 2 * 3, 2)
    assert remarks[1:] == ["steps of further shapes are not captured as a CUDA graph: CUDA out of memory"]


def test_all_shapes_leave_their_gradients_in_the_memory_of_the_first():
    model = stateless()
    step = trainer(model, recorder=Recorder(), weights=list(model.parameters()))
    other = stateless()
    plain = trainer(other)
    places = set()
    for batch in of_sizes(*[8, 5] * 6):
        step(batch, None)
        plain(batch, None)
        assert torch.equal(model.weight.grad, other.weight.grad)
        if step.shapes == 2:
            places.add(model.weight.grad.data_ptr())
    assert len(places) == 1


def test_a_state_that_moves_within_itself_is_copied_as_a_whole():
    batches = list(Echoes(size=2).windows())
    zeros = torch.zeros(8, 2)

    def losses(step):
        found, state = [], (zeros, zeros)
        for batch in batches:
            loss, state = step(batch, state)
            found.append(loss.item())
        return found

    recorder = Recorder()
    assert losses(trainer(Shifting(), recorder=recorder)) == losses(trainer(Shifting()))
    assert recorder.replays == 17


def test_a_model_without_a_state_is_replayed():
    recorder, batches = Recorder(), list(Echoes().windows())
    assert run(trainer(stateless(), recorder=recorder), batches) == run(trainer(stateless()), batches)
    assert recorder.replays == 17


def test_work_that_cannot_be_recorded_is_done_as_usual_and_tried_once():
    batches = list(Echoes().windows())
    recorder, remarks = Recorder(refuses="operation not permitted\nwhen stream is capturing"), []
    assert run(trainer(recorder=recorder, remarks=remarks), batches) == run(trainer(), batches)
    assert (recorder.records, recorder.replays) == (1, 0)
    assert remarks == ["steps are not captured as a CUDA graph: operation not permitted"]


def test_the_first_of_several_errors_is_the_reason():
    def record(work):
        try:
            raise RuntimeError("the cause")
        finally:
            raise RuntimeError("the capture was invalidated")

    remarks = []
    run(trainer(recorder=record, remarks=remarks), list(Echoes().windows()))
    assert remarks == ["steps are not captured as a CUDA graph: the cause"]


def test_batches_that_cannot_be_held_still_are_not_recorded():
    class Lengths(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor
        lengths: list[int]

    batches = [Lengths(batch.x, batch.y, [8]) for batch in Echoes().windows()]
    recorder, remarks = Recorder(), []
    run(trainer(recorder=recorder, remarks=remarks), batches)
    assert recorder.records == 0
    assert remarks == ["steps are not captured as a CUDA graph: a batch must be a named tuple of tensors on one device"]


def test_a_run_with_replays_ends_in_the_same_bits(tmp_path):
    train_language_model(tmp_path / "plain")
    recorder, diary = Recorder(), Diary()
    train_language_model(tmp_path / "replayed", record_step=recorder, observers=[diary])
    assert files_of(tmp_path / "plain") == files_of(tmp_path / "replayed")
    # 49 full windows an epoch, whose first has no state, and a shorter one, which is replayed from the second on.
    assert recorder.replays == 3 * 49 - 3 - WARMUPS + 3 - LATER_WARMUPS
    assert diary.remarks == ["steps are replayed as one CUDA graph"]


# In `make test` two processes that replay steps are interrupted: test_processes.py.
@pytest.mark.exhaustive
def test_a_run_with_replays_is_interrupted_and_goes_on_in_the_same_bits(tmp_path):
    train_language_model(tmp_path / "whole", record_step=Recorder(), average="ema")
    for pause in (1, 30, 40):
        train_language_model(tmp_path / "parts", stop_at=pause, record_step=Recorder(), average="ema")
    train_language_model(tmp_path / "parts", record_step=Recorder(), average="ema")
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


def test_the_data_may_stop_anywhere(tmp_path):
    recorder = Recorder()
    outcome, _ = train(tmp_path, data=StopAt(Echoes(), 10), record_step=recorder)
    assert (outcome.interrupted, outcome.step, recorder.replays) == (True, 10, 6)


def test_refusals_name_their_reason():
    gpu = torch.device("cuda")
    assert refusal(True, Processes(0, 1, gpu)) == ""
    assert refusal(False, Processes(0, 1, gpu)) == "`cuda_graph` is off"
    assert refusal(True, Processes(1, 2, gpu)) == ""
    assert refusal(True, ALONE) == "there are none on a CPU"

"""A step that is not finite is repeated on the reference to find the cause; nothing is lost by it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from echo_model import Batch, Diary, Echoes, echo_model, train
from faulty_model import WRONG, faulty_model
from several import Recorder
from test_resumption import StopAt, files_of
from torch import nn

from gatewise.contract.errors import CheckpointError, KernelFault, NotFinite, TrainingDiverged
from gatewise.training import RunFolder, TrainingOptions, read_tensors, watch
from gatewise.training.checkpoint import write_tensors
from gatewise.training.finite_guard import FiniteGuard, joined
from gatewise.training.history import perplexity
from gatewise.training.json_values import to_json
from gatewise.training.loop import CHECKPOINT
from gatewise.training.optimizers import build_optimizer
from gatewise.training.randomness import restore_random_states
from gatewise.training.recorded_step import read_step
from gatewise.training.snapshot import load_weights, weights_of
from gatewise.training.step import MeanLoss, Step
from tests.pairwise import each_value

CPU = torch.device("cpu")


def fails(error, folder, model, **options):
    with pytest.raises(error) as raised:
        train(folder, model, **({"reference": model.reference()} | options))
    return str(raised.value)


@pytest.fixture(params=["launched", "replayed"])
def way(request):
    return {"record_step": Recorder()} if request.param == "replayed" else {}


def test_a_faulty_step_at_the_end_of_an_epoch_without_evaluation_is_found_there(tmp_path, monkeypatch):
    monkeypatch.setitem(watch.EVERY, "cpu", 7)
    words = fails(KernelFault, tmp_path, faulty_model(19, 0, "loss"), epochs_per_evaluation=2)
    assert "step 20 of training (epoch 1, batch 20) was not finite on the kernel new" in words


@pytest.fixture(scope="module")
def right_losses(tmp_path_factory):
    """The losses of a run without a fault."""
    model = faulty_model()
    train(tmp_path_factory.mktemp("right"), model)
    return model.losses


# When the fault is found: at once, as on a CPU; or steps later, as on a GPU, whose flag is read from time to time.
@pytest.mark.parametrize(
    ("every", "wrong", "at"), each_value([*itertools.product([1, 7], WRONG, [(0, 0), (1, 8), (1, 19)])]), ids=str
)
def test_a_faulty_step_is_finite_on_the_reference_from_the_same_numbers(
    tmp_path, monkeypatch, right_losses, way, every, wrong, at
):
    epoch, number = at
    monkeypatch.setitem(watch.EVERY, "cpu", every)
    step = 20 * epoch + number
    model = faulty_model(number, epoch, wrong)
    words = fails(KernelFault, tmp_path, model, **way)
    assert (
        f"step {step + 1} of training (epoch {epoch + 1}, batch {number + 1}) was not finite on the kernel new" in words
    )
    assert "nan" in words.partition("Repeated on the trusted one")[0]
    assert words.endswith("Go on so.")
    assert f"The checkpoint of step {20 * epoch} is as it was." in words
    # The result includes dropout and the carried state, so no other weights, state or random numbers give these bits.
    assert model.losses[-1] == right_losses[step]
    report = read_step(RunFolder(tmp_path).fault, CPU)[2]
    assert (report["training"], report["step"], report["epoch"], report["batch"]) == (True, step, epoch, number)


def test_the_report_repeats_the_step(tmp_path):
    model = faulty_model(13, wrong="gradient")
    fails(KernelFault, tmp_path, model)
    steps, weights, facts = read_step(RunFolder(tmp_path).fault, CPU)
    options = TrainingOptions(**facts["options"])
    other = faulty_model(13, wrong="gradient", seed=5)
    load_weights(other, weights)
    step = Step(MeanLoss(other), build_optimizer(other.parameters(), options), options.clip, "float32", CPU)
    for trusted, found in ((False, facts["again"]), (True, facts["on the reference"])):
        other.is_trusted = trusted
        restore_random_states(steps[0].random, CPU)
        measured = step.measure(steps[0].batch, steps[0].state)
        assert measured.finite is trusted
        expected = {name: value if value == value else None for name, value in measured._asdict().items()}
        assert found == [expected | {"error": ""}]
    assert {"versions", "device", "running", "environment", "learning_rate", "model"} <= facts.keys()


def test_a_run_goes_on_after_a_fault_in_the_same_bits(tmp_path, way):
    options = {"average": "ema", "checkpoint_steps": 3, "optimizer": "sgd", **way}
    train(tmp_path / "whole", faulty_model(), **options)
    model = faulty_model(8, 1)
    words = fails(KernelFault, tmp_path / "parts", model, **options)
    assert "The checkpoint of step 26 is as it was." in words
    RunFolder(tmp_path / "parts").fault.unlink()
    with model.trusted():
        train(tmp_path / "parts", model, **options)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")


def test_the_error_of_a_resumed_run_names_the_checkpoint_that_it_was_resumed_from(tmp_path):
    train(tmp_path, faulty_model(), data=StopAt(Echoes(), 13))
    assert "The checkpoint of step 13 is as it was." in fails(KernelFault, tmp_path, faulty_model(15))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd"},
        {"optimizer": "adam", "clip": 0.0},
        {"clip_value": 0.1},
        {"optimizer": "sgd", "momentum": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=["fused", "not fused"])
def test_no_step_changes_anything_once_one_was_not_finite(options, kind):
    settings = TrainingOptions(**options)
    model = faulty_model(6, wrong="gradient").to(kind)
    batches = [Batch(each.x.to(kind), each.y.to(kind)) for each in Echoes().windows()]
    model.batch = batches[6]
    optimizer = build_optimizer(model.parameters(), settings)
    step = Step(MeanLoss(model), optimizer, settings.clip, "float32", CPU, settings.clip_value)

    def everything():
        moments = [each for slots in optimizer.state.values() for each in slots.values()]
        return [each.clone() for each in (*model.parameters(), *moments, state[0])]

    state, before = None, []
    for number, batch in enumerate(batches):
        if number == 6:
            before = everything()
        _, state = step(batch, state)
    assert step.guard.skipped == len(batches) - 6
    assert all(torch.equal(one, other) for one, other in zip(before, everything(), strict=True))


class Counting(nn.Module):
    """A model with two buffers, one of which it modifies."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6))

    def loss(self, batch, state=None):
        self.mean.lerp_(batch.x.mean(0), 0.5)
        return (self.weight * (batch.x - self.mean) / self.scale).square().mean(), None


def test_buffers_stay_as_they_were(tmp_path):
    model, data = Counting(), Echoes()
    batches = list(data.windows())
    batches[5].x[0] = torch.inf
    data.windows = lambda epoch=0, start=0: iter(batches[start:])
    with pytest.raises(NotFinite, match=r"step 6 of training"):
        train(tmp_path, model, data)
    expected = Counting()
    for batch in batches[:5]:
        expected.loss(batch)
    assert torch.equal(model.mean, expected.mean)
    assert model.weight.isfinite().all()


def test_a_state_that_changes_its_form_is_kept(tmp_path, monkeypatch):
    """The flag alone could not keep the state before the step, because the batch has a different number of rows."""
    monkeypatch.setitem(watch.EVERY, "cpu", 7)
    rows = [8] * 5 + [3] * 15

    class Shrinking(type(faulty_model())):
        def loss(self, batch, state=None):
            return super().loss(batch, None if state is None else (state[0][: len(batch.x)], None))

    def model(number):
        torch.manual_seed(0)
        return Shrinking(None if number is None else batches[number])

    data = Echoes()
    batches = [Batch(each.x[:size], each.y[:size]) for each, size in zip(data.windows(), rows, strict=True)]
    data.windows = lambda epoch=0, start=0: iter(batches[start:])
    wrong, right = model(5), model(None)
    words = fails(KernelFault, tmp_path, wrong, data=data)
    assert "step 6 of training" in words
    train(tmp_path / "right", right, data)
    assert wrong.losses[-1] == right.losses[5]


def test_training_that_diverges_is_not_blamed_on_the_kernel(tmp_path):
    model = faulty_model()
    words = fails(TrainingDiverged, tmp_path, model, optimizer="sgd", learning_rate=1e30, clip=0.0, schedule="constant")
    assert "nor was it when it was repeated on the trusted one" in words
    assert "Lower `learning_rate` (it is 1e+30) or the norm `clip` that gradients are clipped to (it is 0" in words
    assert "kernel new" not in words
    assert not RunFolder(tmp_path).fault.exists()
    tensors, facts = read_tensors(RunFolder(tmp_path).checkpoint, CHECKPOINT)
    assert facts["step"] == 0
    assert all(each.isfinite().all() for each in tensors.values() if each.is_floating_point())


def test_a_fault_that_does_not_come_back_is_told(tmp_path):
    model = faulty_model(4)
    plain, calls = type(model).loss, []

    def once(batch, state=None):
        calls.append(model.is_trusted)
        model.batch = Echoes_first if len(calls) == 5 else None
        return plain(model, batch, state)

    Echoes_first = next(Echoes().windows(0, 4))
    model.loss = once
    words = fails(KernelFault, tmp_path, model)
    assert "step 5 of training" in words
    assert "nan" not in words


def test_a_reference_that_cannot_compute_the_step_blames_nobody(tmp_path):
    model = faulty_model(4)
    reference = model.reference()

    def refuses():
        raise RuntimeError("CUDA out of memory\nand more")

    words = fails(NotFinite, tmp_path, model, reference=type(reference)(
        context=refuses, name="the trusted one", running="the kernel new", advice="Go on so."))  # fmt: skip
    assert "could not be repeated on the trusted one: CUDA out of memory." in words
    assert RunFolder(tmp_path).fault.exists()


def test_without_a_reference_the_step_is_named(tmp_path):
    model = faulty_model(4)
    with pytest.raises(NotFinite, match=r"step 5 of training .*loss nan.* no `reference`") as raised:
        train(tmp_path, model)
    assert type(raised.value) is NotFinite


@pytest.mark.parametrize("average", ["none", "ema"])
def test_a_validation_loss_that_is_not_finite_is_repeated_too(tmp_path, average):
    valid = Echoes(length=5, seed=1)
    model = faulty_model(3, data=valid)
    words = fails(KernelFault, tmp_path, model, valid=valid, average=average)
    assert "the validation loss after 20 steps was not finite on the kernel new (loss nan" in words
    assert not RunFolder(tmp_path).model.exists()
    steps, weights, facts = read_step(RunFolder(tmp_path).fault, CPU)
    assert facts["training"] is False
    assert torch.equal(steps[0].batch.x, model.batch.x)
    assert torch.equal(weights["inner.weight"], weights_of(model)["inner.weight"]) is (average == "none")
    assert model.training


def test_a_validation_loss_that_overflows_is_divergence(tmp_path):
    huge = Echoes(length=5, seed=1)
    batches = [Batch(each.x, each.y * 1e30) for each in huge.windows()]
    huge.windows = lambda epoch=0, start=0: iter(batches[start:])
    words = fails(TrainingDiverged, tmp_path, faulty_model(), valid=huge)
    assert "the validation loss after 20 steps was not finite" in words


def test_reports_say_nothing_of_a_loss_that_is_not_finite(tmp_path, monkeypatch):
    from gatewise.training import loop

    monkeypatch.setattr(loop, "_REPORT_SECONDS", 0.0)
    monkeypatch.setitem(watch.EVERY, "cpu", 7)
    diary = Diary()
    fails(KernelFault, tmp_path, faulty_model(8), observers=[diary])
    assert len(diary.reports) == 8


def test_an_interruption_after_the_fault_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(watch.EVERY, "cpu", 100)
    words = fails(KernelFault, tmp_path, faulty_model(8), data=StopAt(Echoes(), 12))
    assert "step 9 of training" in words
    assert read_tensors(RunFolder(tmp_path).checkpoint, CHECKPOINT)[1]["step"] == 0


def test_the_guard_knows_what_is_not_finite():
    for value, expected in ((torch.nan, 1), (torch.inf, 1), (-torch.inf, 1), (3e38, 0), (0.0, 0)):
        for place in range(3):
            guard, values = FiniteGuard(CPU), [torch.tensor(1.0)] * 3
            values[place] = torch.tensor(value)
            guard.check([*guard.observe(values[0], (values[1], None)), values[2]])
            assert joined(values).isnan() == expected
            assert (guard.raised, guard.skipped) == (expected, expected)
            guard.check([torch.tensor(0.0)])
            assert (guard.raised, guard.skipped) == (expected, 2 * expected)


def test_a_state_may_have_integers_and_empty_tensors():
    guard = FiniteGuard(CPU)
    assert guard.observe(torch.tensor(1.0), (torch.ones(2, dtype=torch.int64), torch.ones(0, 3))) == [1.0]


def test_a_score_that_is_no_number_is_kept_as_null(tmp_path):
    first, _ = train(tmp_path, score=lambda: {"R2": torch.nan, "other": 1.0})
    header = RunFolder(tmp_path).checkpoint.read_bytes()
    assert b"NaN" not in header
    assert b"Infinity" not in header
    again, _ = train(tmp_path)
    assert [str(each.scores) for each in again.history] == [str(each.scores) for each in first.history]


def test_json_has_null_for_what_is_not_finite():
    value = {"a": [1.0, torch.inf, (torch.nan,)], "b": -torch.inf, "c": "ü", "d": None}
    assert json.loads(to_json(value)) == {"a": [1.0, None, [None]], "b": None, "c": "ü", "d": None}


def test_the_perplexity_of_any_loss_is_a_number_or_infinite():
    assert perplexity(0.0) == 1.0
    assert 1e307 < perplexity(708.9) < torch.inf
    assert perplexity(710.0) == perplexity(torch.inf) == torch.inf
    assert perplexity(torch.nan) != perplexity(torch.nan)


def test_a_file_of_another_kind_is_no_report(tmp_path):
    write_tensors(tmp_path / "file", weights_of(echo_model()), "step", {})
    with pytest.raises(CheckpointError, match="is incomplete: it lacks 'steps'"):
        read_step(tmp_path / "file", CPU)

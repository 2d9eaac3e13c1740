"""The loop: its reports, evaluations and files."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from echo_model import ALONE, Diary, Echoes, echo_model, train

from gatewise.training import RunFolder, evaluate, read_tensors
from gatewise.training import loop as loop_module
from gatewise.training.curves import plot_curves
from gatewise.training.history import Evaluation, Measure
from gatewise.training.loop import MODEL
from gatewise.training.progress import evaluation_line, heading
from gatewise.training.snapshot import load_weights


def test_training_learns(tmp_path):
    before = evaluate(echo_model(), Echoes(length=5, seed=1), ALONE)
    outcome, _ = train(tmp_path, epochs=8)
    assert outcome.history[-1].valid_loss < 0.8 * before
    assert outcome.step == 160


def test_the_best_weights_are_kept_and_the_last_ones_trained(tmp_path):
    outcome, model = train(tmp_path, epochs=3, optimizer="sgd", learning_rate=0.5, schedule="constant", clip=0.0)
    best = min(outcome.history, key=lambda evaluation: evaluation.valid_loss)
    assert best is not outcome.history[-1], "the case must get worse at its end"
    kept = echo_model(seed=9)
    tensors, facts = read_tensors(RunFolder(tmp_path).model, MODEL)
    assert facts == {"made": "for a test"}
    load_weights(kept, tensors)
    valid = Echoes(length=5, seed=1)
    assert evaluate(kept, valid, ALONE) == best.valid_loss
    assert evaluate(model, valid, ALONE) == outcome.history[-1].valid_loss


def test_a_score_may_choose_the_best_weights(tmp_path):
    scores = iter([1.0, 3.0, 2.0, 3.0])
    outcome, _ = train(tmp_path, epochs=4, score=lambda: {"BLEU": next(scores)}, best_by="BLEU", patience=2)
    assert [evaluation.best for evaluation in outcome.history] == [True, True, False, False]
    losses = [evaluation.valid_loss for evaluation in outcome.history]
    assert min(losses) < losses[1], "the case must have its least loss elsewhere"
    kept = echo_model(seed=9)
    load_weights(kept, read_tensors(RunFolder(tmp_path).model, MODEL)[0])
    assert evaluate(kept, Echoes(length=5, seed=1), ALONE) == losses[1]


def test_the_best_weights_keep_no_graph_of_autograd_alive(tmp_path, monkeypatch):
    """A node that accumulates gradients and was created outside of a capture would make a later capture fail."""
    written = []

    def write(path, tensors, kind, facts, written=written):
        written.append((kind, tensors))
        return write_tensors(path, tensors, kind, facts)

    write_tensors = loop_module.write_tensors
    monkeypatch.setattr(loop_module, "write_tensors", write)
    train(tmp_path, epochs=1)
    (best,) = [tensors for kind, tensors in written if kind == MODEL]
    assert best
    assert not any(tensor.requires_grad for tensor in best.values())


def test_the_average_is_what_is_evaluated_and_kept(tmp_path):
    outcome, model = train(tmp_path, epochs=2, average="ema", average_decay=0.95)
    kept = echo_model(seed=9)
    load_weights(kept, read_tensors(RunFolder(tmp_path).model, MODEL)[0])
    assert not torch.equal(kept.inner.weight, model.inner.weight)
    assert evaluate(kept, Echoes(length=5, seed=1), ALONE) == outcome.history[-1].valid_loss


def test_evaluation_has_no_dropout_and_leaves_the_mode_alone():
    model = echo_model(dropout=0.9)
    losses = {evaluate(model, Echoes(length=5), ALONE) for _ in range(3)}
    assert len(losses) == 1
    assert model.training
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_evaluation_carries_the_state():
    model, data = echo_model(), Echoes(length=2)
    batches = list(data.windows())
    carried = evaluate(model, data, ALONE)
    with torch.no_grad():
        model.eval()
        apart = sum(model.loss(batch)[0].item() for batch in batches) / 2
        first, state = model.loss(batches[0])
        second, _ = model.loss(batches[1], state)
    assert carried == pytest.approx((first + second).item() / 2)
    assert carried != pytest.approx(apart)


@pytest.mark.parametrize(("epochs", "every", "found"), [(6, 2, [2, 4, 6]), (5, 3, [3, 5]), (2, 7, [2])])
def test_some_epochs_end_with_an_evaluation_and_the_last_one_always(tmp_path, epochs, every, found):
    outcome, _ = train(tmp_path, epochs=epochs, epochs_per_evaluation=every)
    assert [each.epoch for each in outcome.history] == found
    each_epoch, _ = train(tmp_path / "others", epochs=epochs)
    before = max([0, *found[:-1]])
    assert outcome.history[-1].train_loss == pytest.approx(
        sum(each.train_loss for each in each_epoch.history[before:]) / (epochs - before)
    )
    assert outcome.history[-1].valid_loss == each_epoch.history[-1].valid_loss


def test_an_epoch_has_as_many_evaluations_as_asked_for(tmp_path):
    outcome, _ = train(tmp_path, epochs=2, evaluations_per_epoch=3)
    assert [evaluation.step for evaluation in outcome.history] == [7, 14, 20, 27, 34, 40]
    assert [evaluation.epoch for evaluation in outcome.history] == pytest.approx([0.35, 0.7, 1, 1.35, 1.7, 2])


def test_patience_ends_training(tmp_path):
    outcome, _ = train(
        tmp_path, epochs=30, optimizer="sgd", learning_rate=0.5, schedule="constant", clip=0.0, patience=2
    )
    assert len(outcome.history) < 30
    assert [evaluation.best for evaluation in outcome.history[-3:]] == [True, False, False]


def test_observers_hear_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "_REPORT_SECONDS", 0.0)
    diary = Diary()
    outcome, _ = train(tmp_path, observers=[diary])
    assert diary.starts == [(0, 0)]
    assert tuple(diary.evaluations) == outcome.history
    assert [report.step for report in diary.reports] == list(range(1, 61))
    assert {report.total_steps for report in diary.reports} == {60}
    first_epoch = [report.loss for report in diary.reports[:20]]
    assert sum(first_epoch) / 20 == pytest.approx(outcome.history[0].train_loss)


def test_reports_and_observers_change_no_weight(tmp_path, monkeypatch):
    _, quiet = train(tmp_path / "quiet")
    monkeypatch.setattr(loop_module, "_REPORT_SECONDS", 0.0)
    _, told = train(tmp_path / "told", observers=[Diary()])
    assert torch.equal(quiet.inner.weight, told.inner.weight)


def test_training_works_outside_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tmp_path, epochs=1)))
    thread.start()
    thread.join()
    assert results[0][0].step == 20


def test_the_curves_are_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    outcome, _ = train(tmp_path, evaluations_per_epoch=2)
    for floor in (None, 5.0):
        plot_curves(tmp_path / "curves.png", outcome.history, "words", floor)
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("losses", "some"),
    [
        ([8.5, 4.0], {"100", "1,000", "2,000"}),
        ([16.0, 0.2], {"1", "1,000", "1,000,000"}),
        ([3.93, 3.91], {"50", "50.4"}),
        ([0.0101], {"1.01"}),
    ],
)
def test_ticks_of_the_curves_are_plain_numbers(monkeypatch, tmp_path, losses, some):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr("gatewise.training.curves.save_picture", lambda figure, path, **options: figures.append(figure))
    history = [
        Evaluation(epoch, epoch, loss, loss + 0.01, 1e-3, 1.7e6, 1.0, best=True) for epoch, loss in enumerate(losses, 1)
    ]
    plot_curves(tmp_path / "curves.png", history, "words")
    (figure,) = figures
    figure.canvas.draw()
    left, right = figure.axes
    texts = {name: [label.get_text() for label in axis.get_ticklabels()] for name, axis in named_axes(left, right)}
    assert all(re.fullmatch(r"[\d,]+(\.\d+)?", text) for several in texts.values() for text in several), texts
    assert some <= set(texts["loss"])
    assert set(texts["epoch"]) >= {str(epoch) for epoch in range(1, len(losses) + 1)}
    assert not {"1.5", "0.96"} & set(texts["epoch"])
    assert "1,500,000" in texts["speed"]
    assert all(axis.get_offset_text().get_text() == "" for _, axis in named_axes(left, right))


def named_axes(left, right):
    return ("loss", left.yaxis), ("epoch", left.xaxis), ("speed", right.yaxis)


def test_scores_are_kept_beside_the_losses(tmp_path):
    scored = []

    def score():
        scored.append(model.inner.weight.detach().clone())
        return {"twice": 2.0 * len(scored)}

    model = echo_model()
    diary = Diary()
    first, _ = train(tmp_path, model, score=score, observers=[diary])
    assert [evaluation.scores for evaluation in first.history] == [{"twice": 2.0}, {"twice": 4.0}, {"twice": 6.0}]
    assert [evaluation.scores for evaluation in diary.evaluations] == [each.scores for each in first.history]
    assert not torch.equal(scored[0], scored[1])
    again, _ = train(tmp_path)  # read back from the checkpoint
    assert again.history == first.history


def test_scores_are_those_of_the_averaged_weights(tmp_path):
    weights = []
    model = echo_model()
    train(tmp_path, model, score=lambda: weights.append(model.inner.weight.detach().clone()) or {}, average="ema")
    kept = read_tensors(RunFolder(tmp_path).model, MODEL)[0]
    assert any(torch.equal(kept["inner.weight"], each) for each in weights)
    assert not torch.equal(weights[-1], model.inner.weight)


def test_a_score_and_other_losses_than_perplexity_are_shown(tmp_path):
    pytest.importorskip("matplotlib")
    measure = Measure("squared error", "mse", float, digits=4, score="twice")
    outcome, _ = train(tmp_path, score=lambda: {"twice": 0.25})
    head, line = heading("rows", measure), evaluation_line(outcome.history[-1], measure)
    for word in ("train mse", "valid mse", "twice", "rows/s"):
        assert word in head
    assert "0.2500" in line
    assert f"{outcome.history[-1].valid_loss:.4f}" in line
    assert len(line.partition("  [")[0]) == len(head.removeprefix("[bold]").removesuffix("[/bold]"))
    plot_curves(tmp_path / "one.png", outcome.history, "rows", measure=measure)
    plot_curves(tmp_path / "other.png", outcome.history, "rows")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "other.png").read_bytes()


def test_summaries_have_scores_and_histograms_of_gradients(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gatewise.training.summaries import TensorBoardSummaries

    model = echo_model()
    summaries = TensorBoardSummaries(tmp_path / "tensorboard", Measure("error", "error", float), "rows", model)
    train(tmp_path, model, score=lambda: {"twice": 0.25}, observers=[summaries])
    summaries.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert {"epoch/valid_error", "epoch/valid_twice", "epoch/rows_per_second"} <= set(events.Tags()["scalars"])
    names = {name for name, _ in model.named_parameters()}
    assert set(events.Tags()["histograms"]) == {f"{kind}/{name}" for kind in ("weights", "gradients") for name in names}
    last = events.Histograms("gradients/inner.bias")[-1]
    assert (last.step, last.histogram_value.num) == (60, model.inner.bias.numel())
    assert last.histogram_value.max == pytest.approx(model.inner.bias.grad.max().item())


def test_summaries_are_written_and_cut_back_at_a_resumption(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gatewise.training.summaries import TensorBoardSummaries

    outcome, _ = train(tmp_path)
    for start in (0, 30):
        summaries = TensorBoardSummaries(tmp_path / "tensorboard")
        summaries.started(start, [])
        for evaluation in outcome.history:
            if evaluation.step > start:
                summaries.evaluated(evaluation)
        summaries.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("epoch/valid_perplexity")] == [20, 40, 60]


def failing_after(evaluations):
    """An observer whose computer runs out of memory after some evaluations."""

    class Failing(Diary):
        def evaluated(self, evaluation):
            super().evaluated(evaluation)
            if len(self.evaluations) == evaluations:
                raise RuntimeError("out of memory")

    return Failing()


def test_an_error_leaves_the_best_model_of_evaluations_after_the_last_checkpoint(tmp_path):
    diary = failing_after(3)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(tmp_path, epochs=8, checkpoint_evaluations=100, observers=[diary])
    kept = echo_model(seed=9)
    load_weights(kept, read_tensors(RunFolder(tmp_path).model, MODEL)[0])
    best = min(each.valid_loss for each in diary.evaluations)
    assert evaluate(kept, Echoes(length=5, seed=1), ALONE) == best


def test_checkpoints_that_are_due_by_steps_are_written_after_evaluations_too(tmp_path, monkeypatch):
    written = []
    write_tensors = loop_module.write_tensors

    def write(path, tensors, kind, facts):
        written.append((kind, facts.get("step")))
        return write_tensors(path, tensors, kind, facts)

    monkeypatch.setattr(loop_module, "write_tensors", write)
    train(tmp_path, epochs=1, evaluations_per_epoch=20, checkpoint_evaluations=100, checkpoint_steps=5)
    assert [step for kind, step in written if kind == loop_module.CHECKPOINT] == [0, 5, 10, 15, 20]


def test_the_rate_of_an_evaluation_is_that_of_its_last_step(tmp_path):
    outcome, _ = train(tmp_path, epochs=1, schedule="constant", learning_rate=0.01, warmup_steps=0, rate_tokens=1000)
    (tokens,) = {batch.count for batch in Echoes(length=5).windows()}
    assert outcome.history[-1].learning_rate == pytest.approx(0.01 * tokens / 1000)


def test_the_seconds_of_a_run_include_its_last_checkpoint(tmp_path):
    outcome, _ = train(tmp_path, epochs=1)
    assert outcome.seconds > outcome.history[-1].seconds

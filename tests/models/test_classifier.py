"""The classifier: pooling over each sequence's own steps, its two losses, and the effect of every option."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from gatewise.contract.errors import ArgumentError, KernelRefused
from gatewise.data import SequenceBatches, synthetic
from gatewise.models import SequenceClassifier
from gatewise.training import TrainingOptions
from gatewise.training.graph import ReplayedStep
from gatewise.training.optimizers import build_optimizer
from gatewise.training.step import MeanLoss, Step

SIZES = {"input_size": 3, "classes": 4, "hidden_size": 6}
LENGTHS = torch.tensor([5, 1, 7, 3])


class Batch(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor | None = None


def model(seed=0, **options):
    torch.manual_seed(seed)
    return SequenceClassifier(**(SIZES | options))


def inputs(time=7, batch=4, size=3, seed=0):
    return torch.randn(time, batch, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pooling", ["mean", "last", "max"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_sequence_in_a_batch_is_answered_as_if_alone(pooling, bidirectional):
    subject, x = model(pooling=pooling, bidirectional=bidirectional), inputs()
    together = subject(x, LENGTHS)
    for number, length in enumerate(LENGTHS.tolist()):
        alone = subject(x[:length, number : number + 1])
        assert torch.allclose(together[number], alone[0], atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last", "max"])
def test_what_lies_behind_the_end_is_not_read(pooling):
    subject, x = model(pooling=pooling), inputs()
    before = subject(x, LENGTHS)
    behind = torch.arange(7)[:, None] >= LENGTHS
    changed = x.masked_fill(behind[:, :, None], 1e6)
    assert torch.equal(subject(changed, LENGTHS), before)
    changed[0, 0] += 1
    assert not torch.equal(subject(changed, LENGTHS)[0], before[0])


def test_pooling_is_what_its_name_says():
    x = inputs()
    for pooling, expected in (("mean", lambda y: y.mean(0)), ("max", lambda y: y.max(0).values)):
        subject = model(pooling=pooling)
        hidden, _ = subject.lstm(x)
        assert torch.allclose(subject(x), subject.output(expected(hidden)), atol=1e-6)
    subject = model(pooling="last")
    hidden, _ = subject.lstm(x)
    ends = torch.cat([hidden[-1, :, :6], hidden[0, :, 6:]], dim=-1)  # each direction where it has read everything
    assert torch.allclose(subject(x), subject.output(ends), atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last", "max"])
def test_a_sequence_of_no_steps_is_pooled_to_zeros(pooling):
    subject = model(pooling=pooling)
    answer = subject(inputs(), torch.tensor([0, 1, 7, 3]))
    assert torch.allclose(answer[0], subject.output.bias)
    assert answer.isfinite().all()


def test_the_loss_of_classes_is_the_mean_of_minus_log_probabilities():
    subject, x, targets = model(), inputs(), torch.tensor([0, 3, 1, 1])
    expected = -subject(x, LENGTHS).log_softmax(-1)[torch.arange(4), targets].mean()
    loss, state = subject.loss(Batch(x, targets, LENGTHS))
    assert torch.allclose(loss, expected)
    assert state is None


def test_a_new_model_knows_nothing():
    loss, _ = model(hidden_size=64).loss(Batch(inputs(batch=64), torch.arange(64) % 4))
    assert abs(loss.item() - math.log(4)) < 0.1


def test_numbers_are_standardized_within_the_model_only():
    subject = model(classes=0)
    features, numbers = 5 + 3 * inputs(50), 1000 + 7 * torch.randn(200)
    subject.standardize(features.flatten(0, 1), numbers)
    inner = model(classes=0)
    standard = (features - features.flatten(0, 1).mean(0)) / features.flatten(0, 1).std(0, correction=0)
    scale = numbers.std(correction=0)
    assert torch.allclose(subject(features), numbers.mean() + scale * inner(standard), rtol=1e-5)
    targets = numbers[:4]
    expected = functional.mse_loss(subject(features), targets) / scale.square()
    assert torch.allclose(subject.loss(Batch(features, targets))[0], expected, rtol=1e-3)


def test_a_feature_that_never_changes_stays_finite():
    subject = model()
    features = torch.ones(10, 3)
    subject.standardize(features)
    assert torch.equal(subject.input_scale, torch.ones(3))
    assert subject(features[:, None]).isfinite().all()


@pytest.mark.parametrize("option", ["dropout", "layer_dropout"])
def test_dropout_acts_in_training_only(option):
    subject, x = model(**{option: 0.5}), inputs()
    assert not torch.equal(subject(x), subject(x))
    subject.eval()
    assert torch.equal(subject(x), subject(x))
    assert torch.equal(subject(x), model().eval()(x))


OTHERS = {"num_layers": 1, "bidirectional": False, "pooling": "max", "hidden_size": 5, "classes": 2}


@pytest.mark.parametrize("name", OTHERS)
def test_the_option_changes_the_answer(name):
    one, other = model()(inputs()), model(**{name: OTHERS[name]})(inputs())
    assert one.shape != other.shape or not torch.allclose(one, other)


def test_every_parameter_learns():
    for classes, targets in ((4, torch.tensor([0, 3, 1, 1])), (0, torch.randn(4))):
        for pooling in ("mean", "last", "max"):
            subject = model(classes=classes, pooling=pooling)
            subject.loss(Batch(inputs(), targets, LENGTHS))[0].backward()
            assert all(parameter.grad.abs().sum() > 0 for parameter in subject.parameters())


def test_nan_in_gives_nan_out():
    x = inputs()
    x[2, 0, 1] = float("nan")
    for pooling in ("mean", "last", "max"):
        answer = model(pooling=pooling)(x, LENGTHS)
        assert answer[0].isnan().all()
        assert answer[1:].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer, got 0"),
        ({"input_size": 0}, "`input_size` must be a positive integer, got 0"),
        ({"classes": 1}, "`classes` must be at least 2, or 0 to predict a number, got 1"),
        ({"dropout": 1.0}, r"`dropout` must be a probability in \[0, 1\), got 1.0"),
        ({"pooling": "sum"}, "`pooling` must be one of mean, last, max, got 'sum'"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        model(**options)


def test_a_named_kernel_never_falls_back():
    with pytest.raises(KernelRefused):
        model(kernel="cudnn")(inputs())


@pytest.mark.parametrize("ragged", [False, True])
def test_training_steps_can_be_replayed_although_there_is_no_state(ragged):
    """A stand-in for CUDA graphs, in which a replay calls the function again."""
    data, targets, replays = synthetic(count=80), torch.arange(80) % 2, []
    if ragged:
        lengths = 1 + torch.arange(80) % 10
        lengths[::2] = 10
        keep = (torch.arange(10) < lengths[:, None]).flatten()
        data = dataclasses.replace(data, values=data.values[keep], lengths=lengths)
    batches = SequenceBatches(data, targets, 8, shuffle=True)

    def capture(work):
        def replay():
            replays.append(1)
            work()

        return replay

    results = []
    for replayed in (False, True):
        loss = MeanLoss(model(input_size=2, classes=2))
        options = TrainingOptions(optimizer="adam", learning_rate=0.01)
        step = Step(loss, build_optimizer(loss.parameters(), options), 1.0, "float32", torch.device("cpu"), 0.1)
        train = ReplayedStep(step, capture, lambda sentence: None, list(loss.parameters())) if replayed else step
        losses = [train(batch, None)[0].item() for epoch in range(3) for batch in batches.windows(epoch)]
        results.append((losses, [each.tolist() for each in loss.parameters()]))
    assert results[0] == results[1]
    assert len(replays) > (5 if ragged else 25)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["mean", "last", "max"])
def test_the_gpu_answers_and_learns_as_the_cpu(pooling):
    x, targets = inputs(31, 4), torch.tensor([0, 3, 1, 1])
    lengths = torch.tensor([31, 1, 20, 3])
    one = model(pooling=pooling, hidden_size=32).double()
    other = model(pooling=pooling, hidden_size=32).cuda()
    one.loss(Batch(x.double(), targets, lengths))[0].backward()
    other.loss(Batch(x.cuda(), targets.cuda(), lengths.cuda()))[0].backward()
    torch.testing.assert_close(other(x.cuda(), lengths.cuda()).cpu(), one(x.double(), lengths).float())
    for mine, theirs in zip(other.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad.float(), rtol=1e-3, atol=1e-5)

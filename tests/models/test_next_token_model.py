"""The language model: its loss, its state, and the effect of every option."""

from __future__ import annotations

import math

import pytest
import torch

from gatewise.contract.errors import ArgumentError, KernelRefused
from gatewise.data import Window
from gatewise.models import LanguageModel

SIZES = {"vocabulary_size": 31, "embedding_size": 12, "hidden_size": 12, "num_layers": 2}


def window(time=7, batch=3, seed=0):
    tokens = torch.randint(31, (time + 1, batch), generator=torch.Generator().manual_seed(seed))
    return Window(tokens[:-1], tokens[1:])


def model(seed=0, **options):
    torch.manual_seed(seed)
    return LanguageModel(**(SIZES | options))


def test_the_loss_is_the_mean_of_minus_log_probabilities():
    subject, batch = model(), window()
    logits, _ = subject(batch.inputs)
    expected = -logits.log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).mean()
    assert torch.allclose(subject.loss(batch)[0], expected)


def test_a_new_model_knows_nothing():
    assert abs(model().loss(window())[0].item() - math.log(31)) < 0.1


def test_a_text_in_pieces_with_carried_state_is_the_whole():
    subject, batch = model(), window(time=9)
    whole, end = subject(batch.inputs)
    first, state = subject(batch.inputs[:4])
    second, again = subject(batch.inputs[4:], state)
    assert torch.allclose(torch.cat([first, second]), whole, atol=1e-6)
    for one, other in zip(end, again, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_tied_weights_are_one_parameter():
    tied, untied = model(tied=True), model(tied=False)
    assert tied.output.weight is tied.embedding.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


@pytest.mark.parametrize("name", ["dropout", "embedding_dropout", "layer_dropout"])
def test_each_dropout_acts_in_training_and_not_in_evaluation(name):
    subject, plain, batch = model(**{name: 0.5}), model(), window()
    losses = {subject.loss(batch)[0].item() for _ in range(3)}
    assert len(losses) == 3
    assert torch.equal(subject.eval().loss(batch)[0], plain.eval().loss(batch)[0])


@pytest.mark.parametrize("option", [{"num_layers": 1}, {"embedding_size": 9}, {"hidden_size": 9}, {"tied": True}])
def test_each_size_changes_the_result(option):
    changed, plain = model(**option), model()
    assert [each.shape for each in changed.parameters()] != [each.shape for each in plain.parameters()]
    assert changed.loss(window())[0] != plain.loss(window())[0]


def test_the_kernel_is_asked_for_by_name():
    loss = model().loss(window())[0]
    assert torch.allclose(model(kernel="eager").loss(window())[0], loss, atol=1e-6)
    with pytest.raises(KernelRefused):
        model(kernel="cudnn").loss(window())


def test_a_single_layer_with_layer_dropout_does_not_warn(recwarn):
    model(num_layers=1, layer_dropout=0.5)
    assert not recwarn.list


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_positive(name):
    with pytest.raises(ArgumentError, match=f"`{name}` must be a positive integer, got 0"):
        model(**{name: 0})


@pytest.mark.parametrize("name", ["dropout", "embedding_dropout", "layer_dropout"])
@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_dropout_is_a_probability(name, rate):
    with pytest.raises(ArgumentError, match=rf"`{name}` must be a probability in \[0, 1\), got {rate}"):
        model(**{name: rate})


@pytest.mark.parametrize("sizes", [{"hidden_size": 13}, {"embedding_size": 13}])
def test_tied_weights_of_other_sizes_are_reached_by_a_projection(sizes):
    subject, batch = model(**sizes, tied=True), window()
    assert subject.output.weight is subject.embedding.weight
    assert subject.narrowed.weight.shape == (subject.embedding.embedding_dim, subject.lstm.hidden_size)
    hidden, _ = subject.lstm(subject.embedding(batch.inputs))
    logits = hidden @ subject.narrowed.weight.T @ subject.embedding.weight.T + subject.output.bias
    assert torch.allclose(subject(batch.inputs)[0], logits, atol=1e-6)
    loss, _ = subject.loss(batch)
    assert torch.allclose(loss, -logits.log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).mean(), atol=1e-6)
    loss.backward()
    assert subject.narrowed.weight.grad.count_nonzero()


@pytest.mark.parametrize("options", [{"tied": True}, {"tied": False, "hidden_size": 13}])
def test_there_is_no_projection_without_need(options):
    assert model(**options).narrowed is None

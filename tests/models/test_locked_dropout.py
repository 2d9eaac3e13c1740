"""Locked dropout has one mask for all steps; word dropout one for all occurrences of a word."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gatewise.contract.errors import ArgumentError
from gatewise.models.locked_dropout import LockedDropout, with_dropped_words


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_mask_for_all_steps_and_another_in_each_call(dtype):
    torch.manual_seed(0)
    subject, x = LockedDropout(0.25), torch.rand(9, 4, 50, dtype=dtype) + 1
    first, second = subject(x), subject(x)
    assert first.dtype == dtype
    kept = first[0] != 0
    assert torch.equal(first != 0, kept.expand(9, 4, 50))
    assert not torch.equal(kept, second[0] != 0)
    torch.testing.assert_close(first, x * kept / 0.75)
    assert abs(kept.double().mean().item() - 0.75) < 4 * (0.25 * 0.75 / 200) ** 0.5
    assert len({tuple(row) for row in kept.tolist()}) == 4, "every sequence has a mask of its own"


@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_dropped_at_rate_zero_or_in_evaluation(rate, training):
    x, state = torch.rand(3, 2, 4), torch.random.get_rng_state()
    assert LockedDropout(rate).train(training)(x) is x
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("rate", [1.5, -0.1, float("nan"), True, "0.5", None])
def test_rates_that_are_assigned_are_checked_by_the_next_call(rate):
    subject, x = LockedDropout(0.5), torch.rand(3, 2, 4)
    subject.p = rate
    with pytest.raises(ArgumentError, match=f"`p` must be from 0 to 1, got {rate!r}"):
        subject(x)
    with pytest.raises(ArgumentError, match=f"`word_dropout` must be from 0 to 1, got {rate!r}"):
        with_dropped_words(x, torch.zeros(3, 2, dtype=torch.int64), 5, rate)


def test_everything_is_dropped_at_rate_one_as_by_nn_dropout():
    x = torch.rand(3, 2, 4, requires_grad=True)
    y = LockedDropout(1.0)(x)
    y.sum().backward()
    for found in (y, x.grad):
        assert torch.equal(found, nn.Dropout(1.0)(torch.ones(3, 2, 4)))


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_probability_out_of_range_is_refused(p):
    with pytest.raises(ArgumentError, match=f"`p` must be from 0 to 1, got {p}"):
        LockedDropout(p)


def test_gradients_pass_through_what_was_kept():
    x = torch.rand(3, 2, 4, requires_grad=True)
    y = LockedDropout(0.5)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0) * 2.0)


def test_a_word_is_dropped_wherever_it_occurs():
    torch.manual_seed(0)
    tokens, weight = torch.randint(40, (30, 5)), torch.rand(40, 8) + 1
    found = with_dropped_words(weight[tokens], tokens, 40, 0.25)
    scales = (found / weight[tokens]).mean(-1)
    of_words = [scales[tokens == word] for word in tokens.unique()]
    for scale in of_words:
        assert scale.allclose(scale[0]), "all occurrences of a word are treated alike"
    assert {round(scale[0].item(), 4) for scale in of_words} == {0.0, 1.3333}


def test_dropping_words_is_dropping_rows_of_the_embedding():
    tokens, weight = torch.randint(40, (30, 5)), torch.rand(40, 8, requires_grad=True)
    torch.manual_seed(0)
    found = with_dropped_words(weight[tokens], tokens, 40, 0.25)
    torch.manual_seed(0)
    mask = torch.empty(40).bernoulli_(0.75).div_(0.75)
    expected = (weight * mask.unsqueeze(-1))[tokens]
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(each.square().sum(), weight)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)

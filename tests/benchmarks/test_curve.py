"""The comparison of loss curves, whatever is trained."""

from __future__ import annotations

import math

import pytest
import torch

from gatewise.benchmarks.curve import STEPS, Finding, Nudge, Rival, descent, followed, not_finite, rounding_of_sum

ROUNDING = 2.0**-10


def rival() -> Rival:
    """A rival whose loss is 2 at each step, and at the second step differs by up to 0.5 if its weights are changed."""

    def losses(nudge: Nudge | None) -> tuple[float, ...]:
        if nudge is None:
            return (2.0, 2.0, 2.0)
        assert nudge.share == ROUNDING / 8
        return (2.0, 2.0 + 0.5 / nudge.seed, 2.0)

    return Rival(losses, ROUNDING / 8, ROUNDING)


def test_the_allowance_is_twice_the_largest_spread_and_one_rounding() -> None:
    assert rival().beside((2.0,) * 3).allowed == pytest.approx([1.0 + 4 * ROUNDING] * 3)
    assert rival().beside((1.0, 1.0, 3.0)).agrees
    assert not rival().beside((2.0, 2.0, 0.99)).agrees
    assert not rival().beside((3.01, 2.0, 2.0)).agrees


def test_the_rivals_own_distance_from_float64_is_allowed_twice_to_others() -> None:
    losses = {None: (2.0, 2.0)}
    asked = []
    rival = Rival(lambda nudge: losses.get(nudge, (2.0, 2.0)), 0.0, 0.0, exact=lambda: asked.append(1) or (2.25, 2.0))
    assert rival.beside((2.0, 2.0)).agrees
    assert not asked
    assert rival.beside((2.25, 2.5)).agrees
    assert not rival.beside((2.51, 2.0)).agrees
    assert not rival.beside((2.0, math.nan)).agrees


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_rival_that_is_no_number_allows_nothing(loss: float) -> None:
    broken = Rival(lambda nudge: (2.0, loss if nudge and nudge.seed == 3 else 2.0), ROUNDING, ROUNDING)
    assert not broken.beside((2.0, 2.0)).agrees


def test_a_loss_may_be_added_up_in_any_order() -> None:
    """Recursive summation of many positive numbers in float32, which has the largest errors of all orders."""
    numbers = 9 + torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    added = torch.zeros(())
    for number in numbers:
        added += number
    exact = float(numbers.double().sum())
    assert 2.0**-24 < abs(float(added) - exact) / exact < rounding_of_sum(10_000)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_no_number_is_not_allowed_even_where_the_rival_has_none(loss: float) -> None:
    assert not rival().beside((2.0, 2.0, loss)).agrees
    assert not Finding((loss,), (loss,), (loss,)).agrees
    assert str(loss) in not_finite((1.0, loss))
    assert not_finite((1.0, 2.0)) == ""


def test_the_sentence_names_the_rival_and_the_first_step() -> None:
    assert str(Finding((1.0, 2.0, 9.0), (1.0, 1.0, 1.0), (0.1, 0.1, 0.1), "plain PyTorch")) == (
        "after 1 steps of training the loss is 2, plain PyTorch's 1 (allowed: 1.0e-01)"
    )
    assert str(Finding((1.0, 1.0), (1.0, 1.0), (0.1, 0.1), "plain PyTorch")) == (
        "the loss of 2 steps of training is that of plain PyTorch"
    )


def test_a_loss_that_is_overwritten_is_read_in_time() -> None:
    place = torch.zeros(())
    assert followed(lambda: place.add_(1.0)) == tuple(range(1, STEPS + 1))


def test_a_nudge_moves_each_number_by_its_share() -> None:
    weights = [torch.randn(31, 3), torch.randn(31)]
    moved = [weight.clone() for weight in weights]
    Nudge(0.01, 1).move(moved)
    for weight, other in zip(weights, moved, strict=True):
        ratio = other / weight
        torch.testing.assert_close((ratio - 1).abs(), torch.full_like(weight, 0.01), rtol=1e-3, atol=0)
        assert 0 < (ratio > 1).sum() < weight.numel()


def test_gradients_of_a_large_mean_do_not_vanish_in_float16() -> None:
    weight = torch.randn(64, requires_grad=True, dtype=torch.float16)
    seen = []
    weight.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))
    losses = descent(lambda: weight.expand(4000, 64) * 1.0, torch.Size((4000, 64)), [weight])
    assert min(seen) > 1e-3
    assert losses[-1] < losses[0]

"""A trajectory passes within the spread of nn.LSTM's seeds, and not beyond it."""

import math

import pytest

from gatewise.benchmarks.trajectories.verdict import WINDOW, smoothed, verdict

STEPS = 12 * WINDOW


def curve(offset=0.0, rate=0.003):
    return [3.0 * math.exp(-rate * step) + offset for step in range(STEPS)]


SEEDS = [curve(), curve(0.02), curve(-0.03)]


def test_nn_lstm_itself_is_within_the_spread():
    assert verdict(SEEDS[:1], SEEDS).worst == 0
    assert verdict(SEEDS[:1], SEEDS).note == ""


def test_half_the_spread_passes_and_twice_does_not():
    assert verdict([curve(0.024)], SEEDS).worst == pytest.approx(0.48)
    found = verdict([curve(0.1)], SEEDS)
    assert found.worst == pytest.approx(2.0)
    assert "around step" in found.note


def test_a_curve_that_leaves_the_spread_late_does_not_pass():
    ours = curve()
    ours[-WINDOW:] = [loss + 0.5 for loss in ours[-WINDOW:]]
    assert f"around step {STEPS - WINDOW}" in verdict([ours], SEEDS).note


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_named_with_its_step(bad):
    ours = curve()
    ours[7] = bad
    assert verdict([ours], SEEDS).note == f"the loss is {bad} after 7 steps"


def test_a_task_that_nobody_learns_shows_nothing():
    flat = [3.0] * STEPS
    assert "learns nothing" in verdict([flat], [flat, flat, flat]).note


def test_windows_are_averaged_to_the_end():
    assert smoothed([1.0] * WINDOW + [2.0, 4.0]) == [1.0, 3.0]


def test_several_seeds_are_compared_by_their_means():
    found = verdict([curve(0.03), curve(-0.02), curve(0.0)], SEEDS)
    assert found.worst == pytest.approx(abs(0.01 / 3 + 0.01 / 3) / 0.05)
    assert verdict([curve(0.3), curve(0.28), curve(0.27)], SEEDS).note

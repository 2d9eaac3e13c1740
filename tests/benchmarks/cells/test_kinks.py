"""Gradients of cells that are not smooth may differ by whole elements."""

from __future__ import annotations

import math

import pytest
import torch

from gatewise.benchmarks.cells.cases import chosen_cells
from gatewise.benchmarks.cells.kinks import has_kinks, slack

SMOOTH, WITH_KINKS = ("lstm", "gru", "rnn_tanh", "peephole_lstm", "mgu"), ("rnn_relu", "capped_lstm", "slstm")


@pytest.mark.parametrize("name", [*SMOOTH, *WITH_KINKS])
def test_kinks_are_found_in_the_step(name: str) -> None:
    (cell,) = chosen_cells([name])
    with torch.no_grad():
        assert has_kinks(cell) is (name in WITH_KINKS)


def test_the_slack_is_that_of_a_few_elements() -> None:
    count = 3_000_000
    few = slack(count, 1e-9)
    assert 2 / math.sqrt(count) < few < 2.2 / math.sqrt(count)
    assert slack(count, 1e-2) > few
    assert slack(count, math.nan) == 0


def test_elements_on_other_sides_of_kinks_stay_within_the_slack() -> None:
    """The gradient of relu at arguments with and without an error differs by less than the slack."""
    generator = torch.Generator().manual_seed(0)
    count, error = 1_000_000, 1e-5
    z = torch.randn(count, generator=generator, dtype=torch.float64)
    moved = z + error * torch.randn(count, generator=generator, dtype=torch.float64)
    exact, found = (z > 0).double(), (moved > 0).double()
    distance = float((found - exact).norm() / exact.norm())
    assert 0 < distance < 2 * slack(count, error)

"""The masks of a regularised cell, as `Inputs.noise` holds them: their shapes, and those of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gatewise.cells import Regularised
from gatewise.contract.problem import Problem


class LayerNoise(NamedTuple):
    """The masks of one layer.

    Attributes:
        hidden: The units of the hidden state that enter the recurrent product [D, B, R], bool; None without recurrent
            dropout.
        zoneout: For each state with zoneout, the units that keep their value from before a step [T, B, D*H], bool.
    """

    hidden: Tensor | None = None
    zoneout: tuple[Tensor, ...] = ()


class MaskSpec(NamedTuple):
    """The shape of a mask, and the probability of each of its elements to be True."""

    shape: tuple[Any, ...]
    probability: float


def is_regularised(problem: Problem) -> bool:
    """Return whether the cell of a problem has masks."""
    return isinstance(problem.cell, Regularised)


def mask_specs(problem: Problem, tokens: Sequence[Any], states: Sequence[Any]) -> list[MaskSpec]:
    """Return the masks of a call in the order of `Inputs.noise`.

    Args:
        problem: The problem.
        tokens: The sizes [T, B], or [N] of a packed batch.
        states: The sizes [L*D, B, R] of the initial hidden state.
    """
    cell = problem.cell
    if not isinstance(cell, Regularised):
        return []
    hidden = [MaskSpec(tuple(states), 1.0 - cell.recurrent_dropout)] if cell.recurrent_dropout else []
    shape = (*tokens, problem.num_directions * problem.hidden_size)
    return hidden + [MaskSpec(shape, rate) for rate in cell.zoneout if rate] * problem.num_layers


def of_layers(problem: Problem, noise: Sequence[Tensor], first: int, last: int) -> LayerNoise:
    """Return the masks of consecutive layers, counted from 0, which are those of one layer if both are the same.

    Args:
        problem: The problem of all layers.
        noise: The masks of the call, `Inputs.noise`.
        first: The first of the layers.
        last: The last of the layers.
    """
    cell = problem.cell
    if not isinstance(cell, Regularised):
        return LayerNoise()
    hidden, zoneout = (noise[0], noise[1:]) if cell.recurrent_dropout else (None, noise)
    directions, count = problem.num_directions, len(cell.zoned)
    return LayerNoise(
        None if hidden is None else hidden[first * directions : (last + 1) * directions],
        tuple(zoneout[first * count : (last + 1) * count]),
    )

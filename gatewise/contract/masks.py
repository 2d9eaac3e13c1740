"""The masks of a call, as `Inputs.masks` holds them: their shapes, and those that the cell of one layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gatewise.cells import Regularised
from gatewise.contract.problem import Problem


class CellMasks(NamedTuple):
    """The masks that the cell of one layer reads; none unless it is regularised.

    Attributes:
        hidden: The units of the hidden state that enter the recurrent product [D, B, R], bool; None without recurrent
            dropout.
        of_steps: The masks that change at every step [T, B, D*H], bool, in the order of `Regularised.of_steps`.
    """

    hidden: Tensor | None = None
    of_steps: tuple[Tensor, ...] = ()


class MaskSpec(NamedTuple):
    """The shape of a mask, and the probability of each of its elements to be True."""

    shape: tuple[Any, ...]
    probability: float


def mask_specs(problem: Problem, tokens: Sequence[Any], states: Sequence[Any]) -> list[MaskSpec]:
    """Return the masks of a call in the order of `Inputs.masks`.

    Args:
        problem: The problem.
        tokens: The sizes [T, B], or [N] of a packed batch.
        states: The sizes [L*D, B, R] of the initial hidden state.
    """
    cell, specs = problem.cell, [MaskSpec((*tokens, problem.output_size), 1.0 - problem.dropout)] * _gaps(problem)
    if not isinstance(cell, Regularised):
        return specs
    if cell.recurrent_dropout:
        specs.append(MaskSpec(tuple(states), 1.0 - cell.recurrent_dropout))
    shape = (*tokens, problem.num_directions * problem.hidden_size)
    return specs + [MaskSpec(shape, probability) for probability in cell.of_steps.values()] * problem.num_layers


def draws_masks(problem: Problem) -> bool:
    """Return whether a call draws masks."""
    return problem.dropout > 0 or isinstance(problem.cell, Regularised)


def masks_of_cell(problem: Problem, masks: Sequence[Tensor], first: int, last: int) -> CellMasks:
    """Return the masks that the cells of consecutive layers read; those of one layer if both are the same.

    Args:
        problem: The problem of all layers.
        masks: The masks of the call, `Inputs.masks`.
        first: The first of the layers, counted from 0.
        last: The last of the layers.
    """
    cell = problem.cell
    if not isinstance(cell, Regularised):
        return CellMasks()
    own = masks[_gaps(problem) :]
    hidden, of_steps = (own[0], own[1:]) if cell.recurrent_dropout else (None, own)
    directions, count = problem.num_directions, len(cell.of_steps)
    return CellMasks(
        None if hidden is None else hidden[first * directions : (last + 1) * directions],
        tuple(of_steps[first * count : (last + 1) * count]),
    )


def _gaps(problem: Problem) -> int:
    return problem.num_layers - 1 if problem.dropout else 0

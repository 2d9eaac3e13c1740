"""The tensors of cells with several carried states, parameters, statistics or masks, as operands of launches."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.cells import Regularised
from gatewise.contract.problem import Problem
from gatewise.derivation.trace import traced
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.stack import Layer
from gatewise.kernels.stepwise.products import state_dtype


def kept_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype of the carried states that the forward pass keeps for the backward pass.

    Cells that are not fused compute their step again from these states, which the rounding to 16 bits would change.
    """
    return problem.dtype if is_fused(problem.cell) else state_dtype(problem.dtype)


def statistics_count(problem: Problem) -> int:
    """Return the number of means and deviations over hidden units that a step computes for each sequence."""
    return 0 if is_fused(problem.cell) else len(traced(problem.cell).statistics)


def statistics_of(problem: Problem, like: Tensor) -> Tensor | None:
    """Return an uninitialized tensor for the statistics of all steps [D, T, B, count]; None if the cell has none."""
    count = statistics_count(problem)
    shape = problem.num_directions, problem.time, problem.batch, count
    return like.new_empty(shape, dtype=state_dtype(problem.dtype)) if count else None


def parameters_of(layer: Layer) -> Tensor | None:
    """Return the parameters of a layer's cell [D, P, H]; None if it has none."""
    each = [parameter for weights in layer.weights for parameter in weights.parameters]
    return torch.stack(each).unflatten(0, (len(layer.weights), -1)) if each else None


def parameter_sums(problem: Problem, like: Tensor) -> Tensor | None:
    """Return zeros [D, B, P, H] to which the backward pass adds the gradients of the parameters, or None."""
    count = len(problem.cell.parameters)
    shape = problem.num_directions, problem.batch, count, problem.hidden_size
    return like.new_zeros(shape, dtype=state_dtype(problem.dtype)) if count else None


def masks_of(layer: Layer) -> Tensor | None:
    """Return the masks of steps of a layer's cell [M, T, B, D*H]; None if it has none."""
    each = layer.masks.of_steps
    return torch.stack(each) if len(each) > 1 else each[0].contiguous() if each else None


def factors_of(problem: Problem, layer: Layer) -> Tensor | None:
    """Return the factors of the hidden states in the recurrent products [D, B, H]; None without recurrent dropout."""
    if layer.masks.hidden is None or not isinstance(problem.cell, Regularised):
        return None
    return layer.masks.hidden.to(state_dtype(problem.dtype)) * (1.0 / (1.0 - problem.cell.recurrent_dropout))


def dropped(hidden: Tensor, factors: Tensor | None) -> Tensor:
    """Return hidden states, or gradients of them, with recurrent dropout applied."""
    return hidden if factors is None else (hidden * factors).to(hidden.dtype)

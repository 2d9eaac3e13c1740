"""The choice of how a layer computes a single step whose states are carried from call to call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.pytorch import in_pytorch, pytorch_layer
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.aten import OPERATORS, GRUStep, LSTMStep
from gatewise.kernels.eager import Product, one_step, state_dtype
from gatewise.kernels.stepwise.single_criteria import held_bytes, refusals_of

if TYPE_CHECKING:
    from gatewise.kernels.stepwise.single import SingleSteps

__all__ = [
    "NOT_CAPTURED",
    "Product",
    "SingleSteps",
    "Step",
    "algorithm_on_cpu",
    "held_bytes",
    "held_steps",
    "in_one_launch",
    "refusals_of",
    "repeated_step_of",
    "state_dtype",
    "step_of",
]


NOT_CAPTURED = "a call in the capture of a CUDA graph, whose replays would not carry the states"
"""Why a capture has no step that is a call of a kernel for a sequence of one step."""


class Step(Protocol):
    """A function that computes a step of one layer."""

    def __call__(
        self, x: Tensor, states: tuple[Tensor, ...], weights: Sequence[Tensor], product: Product | None
    ) -> tuple[Tensor, ...]:
        """Return the states after the step, in the dtype of those before it."""
        ...


@functools.lru_cache(maxsize=256)
def step_of(cell: Cell, dtype: torch.dtype, projected: bool, structured: bool) -> Step:
    """Return the function for a step of a layer on a CPU.

    PyTorch has one operator for a step of its own cells, which takes half of the time of several operators called from
    Python. In 16 bits that operator rounds every value of the step, so that it is not used there.

    Args:
        cell: The cell, as in evaluation mode.
        dtype: The dtype of the input and the weights.
        projected: Whether the layer has a projection.
        structured: Whether the recurrent products are made by a function, instead of one matrix.
    """
    operator = _operator(cell, dtype, projected, structured)
    if operator is None:
        return functools.partial(_of_any, cell)
    return functools.partial(_of_pair if cell.states else _of_one, OPERATORS[operator])


def repeated_step_of(
    cell: Cell, dtype: torch.dtype, projected: bool, batch: int, hidden_size: int
) -> Callable[..., tuple[Tensor, ...]] | None:
    """Return a function for steps on a CPU that do not overlap: its arguments are x, the states and each weight.

    It computes what `step_of` does, to rounding, and may keep memory from step to step.

    Args:
        cell: The cell, as in evaluation mode.
        dtype: The dtype of the input and the weights.
        projected: Whether the layer has a projection.
        batch: B, the number of sequences.
        hidden_size: H, the number of hidden units.

    Returns:
        The function, which returns the states after the step; None if PyTorch has no operator for the step.
    """
    operator = _operator(cell, dtype, projected, structured=False)
    if operator is None:
        return None
    in_place = {"LSTM": LSTMStep, "GRU": GRUStep}.get(operator)
    if in_place is not None:
        return in_place(batch, hidden_size, dtype)
    return functools.partial(_in_tuple, OPERATORS[operator])


def _in_tuple(
    operator: Callable[..., Tensor], x: Tensor, states: tuple[Tensor, ...], *weights: Tensor
) -> tuple[Tensor, ...]:
    return (operator(x, states[0], *weights),)


def _operator(cell: Cell, dtype: torch.dtype, projected: bool, structured: bool) -> str | None:
    """Return the key of PyTorch's operator for a step, as `OPERATORS` has it; None if it takes several operators."""
    if in_pytorch(cell) and not projected and not structured and state_dtype(dtype) == dtype:
        return pytorch_layer(cell).mode
    return None


def algorithm_on_cpu(problem: Problem, structured: bool) -> str:
    """Return a short description of the operators with which `step_of` computes a step."""
    operator = _operator(problem.cell, problem.dtype, problem.proj_size > 0, structured)
    if operator is None:
        return "a few operators of `eager` for each layer"
    return f"the operators of torch.{OPERATORS[operator].__name__} for each layer"


def in_one_launch(problem: Problem, device: torch.device) -> bool:
    """Return whether the steps that `held_steps` returns compute a call, with one launch for each layer.

    Args:
        problem: The call, of one step.
        device: The device of the call, a CPU or a CUDA device.
    """
    return not refusals_of(problem, Device.probe(device))


def held_steps(cell: Cell, states: Sequence[tuple[Tensor, ...]], dtype: torch.dtype) -> SingleSteps:
    """Return steps that hold the states of a stack of layers on a GPU, for calls that `in_one_launch` accepts.

    Args:
        cell: The cell, as in evaluation mode.
        states: For each layer the hidden state and the other states before the first step [B, H].
        dtype: The dtype of the calls.
    """
    # It loads what compiles and launches kernels, which programs on a CPU need not.
    from gatewise.kernels.stepwise.single import SingleSteps

    return SingleSteps(cell, states, dtype)


def _of_pair(
    operator: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    states: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    product: Product | None,
) -> tuple[Tensor, ...]:
    return operator(x, states, *weights)


def _of_one(
    operator: Callable[..., Tensor],
    x: Tensor,
    states: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    product: Product | None,
) -> tuple[Tensor, ...]:
    return (operator(x, states[0], *weights),)


def _of_any(
    cell: Cell, x: Tensor, states: tuple[Tensor, ...], weights: Sequence[Tensor], product: Product | None
) -> tuple[Tensor, ...]:
    return one_step(cell, x, states, DirectionWeights.from_tensors(weights, len(cell.parameters)), product)

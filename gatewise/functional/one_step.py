"""One time step of a stack of layers without gradients, whose states the caller carries from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.problem import NORMAL
from gatewise.functional.arguments import check_input
from gatewise.functional.differentiable import autocast_dtype, recurrent
from gatewise.functional.passes import first_calls_permitted, without_autocast
from gatewise.functional.weights import Form, forms_of, structure_of
from gatewise.selection import AUTO, FREE, preference
from gatewise.selection.one_step import (
    NOT_CAPTURED,
    Product,
    Step,
    held_steps,
    in_one_launch,
    repeated_step_of,
    state_dtype,
    step_of,
)

if TYPE_CHECKING:
    from gatewise.selection.one_step import SingleSteps

__all__ = [
    "NOT_CAPTURED",
    "Product",
    "SingleSteps",
    "Stack",
    "autocast_dtype",
    "check_tensors_of_step",
    "held_step",
    "held_steps",
    "in_one_launch",
    "one_call",
    "one_step",
    "repeated_step_of",
    "state_dtype",
    "steps_directly",
    "steps_freely",
]

Stack = list[tuple[Tensor, ...]]
"""The states of each layer: the hidden state [B, R], and the others [B, H]."""


def steps_freely(kernel: str) -> bool:
    """Return whether no kernel is named for a call.

    Args:
        kernel: The layer's kernel: a name or "auto".
    """
    found = preference(kernel)
    return found is FREE or found.kernel == AUTO


def steps_directly(x: Tensor, kernel: str) -> bool:
    """Return whether `one_step` computes a call, which is on a CPU and names no kernel.

    Args:
        x: The input.
        kernel: The layer's kernel: a name or "auto".
    """
    return x.is_cpu and steps_freely(kernel)


def check_tensors_of_step(cell: Cell, x: Tensor, weights: Sequence[Tensor]) -> None:
    """Check the input and the weights of a step as a call of the layer does.

    Args:
        cell: The cell.
        x: The input [B, I], in the dtype of the call.
        weights: The weights in the flat order of PyTorch's layers.

    Raises:
        ShapeError: A shape does not fit the others.
        DtypeError: The tensors are of several dtypes, or the dtype is not a float dtype that layers take.
        DeviceError: The tensors are on several devices.
    """
    found = structure_of(forms_of(weights), False, len(cell.gates), len(cell.parameters))
    check_input(Form(torch.Size((1, *x.shape)), x.dtype, x.device), found, packed=False)


def one_step(
    cell: Cell,
    x: Tensor,
    states: Stack,
    weights: Sequence[Sequence[Tensor]],
    products: Sequence[Product] | None = None,
    *,
    projected: bool = False,
) -> Stack:
    """Return the states of all layers after a step on a CPU.

    Args:
        cell: The cell, as in evaluation mode.
        x: The input [B, I], in the dtype of the call.
        states: The states before the step, in the dtype of states.
        weights: The weights of each layer, as in `all_weights`, in the dtype of the call.
        products: For each layer the function of its recurrent products; None if they are those of the weights.
        projected: Whether the layers have projections.
    """
    step = step_of(cell, x.dtype, projected, products is not None)
    # A context takes a few microseconds to enter and leave, as long as an operator.
    if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
        with torch.no_grad(), without_autocast(x):
            return _through_layers(step, x, states, weights, products)
    return _through_layers(step, x, states, weights, products)


def _through_layers(
    step: Step, x: Tensor, states: Stack, weights: Sequence[Sequence[Tensor]], products: Sequence[Product] | None
) -> Stack:
    dtype, after = x.dtype, []
    for layer, before in enumerate(states):
        if layer:
            x = after[-1][0].to(dtype)
        after.append(step(x, before, weights[layer], None if products is None else products[layer]))
    return after


def held_step(held: SingleSteps, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the output of a step whose states are held on a GPU [B, H].

    Weights are checked in the first call, and when one of them has another address or form than in the call before.

    Args:
        held: The steps.
        x: The input [B, I], in the dtype of the steps.
        weights: The weights in the flat order of PyTorch's layers, in the same dtype.

    Raises:
        ShapeError: A shape does not fit the others, or the states.
        DtypeError: The weights are of several dtypes.
        DeviceError: The weights are on several devices.
    """
    if not held.is_prepared_for(weights):
        check_tensors_of_step(held.cell, x, weights)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            with first_calls_permitted():
                held.prepare(weights)
        else:
            held.prepare(weights)
    return held.step(x)


def one_call(cell: Cell, x: Tensor, states: Stack, weights: Sequence[Sequence[Tensor]], kernel: str) -> Stack:
    """Return the states of all layers after a step, by the kernel that computes a sequence of one step.

    Args:
        cell: The cell, as in evaluation mode.
        x: The input [B, I].
        states: The states before the step, in the dtype of the input.
        weights: The weights of each layer, as in `all_weights`.
        kernel: The name of a kernel, or "auto".
    """
    h, *others = (torch.stack(each) for each in zip(*states, strict=True))
    with torch.no_grad():
        given = h, _side_by_side(others) if others else h.new_zeros(*h.shape[:2], 0)
        _, h, found = recurrent(
            x.unsqueeze(0),
            given,
            tuple([weight for layer in weights for weight in layer]),
            lengths=None,
            batch_sizes=None,
            bidirectional=False,
            dropout=0.0,
            kernel=kernel,
            memory=NORMAL,
            cell=cell,
        )
        separate = found.chunk(len(cell.states), -1) if cell.states else ()
        return list(zip(*[each.unbind(0) for each in (h, *separate)], strict=True))


def _side_by_side(others: list[Tensor]) -> Tensor:
    with without_autocast(others[0]):
        return torch.cat(others, -1) if len(others) > 1 else others[0]

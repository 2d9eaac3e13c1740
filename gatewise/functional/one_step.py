"""One time step of a stack of layers without gradients, whose states the caller carries from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.problem import NORMAL
from gatewise.functional.differentiable import recurrent
from gatewise.functional.passes import first_calls_permitted, without_autocast
from gatewise.selection import AUTO, preference
from gatewise.selection.one_step import Product, Step, held_steps, in_one_launch, state_dtype, step_of

if TYPE_CHECKING:
    from gatewise.selection.one_step import SingleSteps

__all__ = [
    "Product",
    "SingleSteps",
    "Stack",
    "dtype_of_call",
    "held_step",
    "held_steps",
    "one_call",
    "one_step",
    "state_dtype",
    "steps_directly",
    "steps_in_one_launch",
]

Stack = list[tuple[Tensor, ...]]
"""The states of each layer: the hidden state [B, R], and the others [B, H]."""


def steps_directly(x: Tensor, kernel: str) -> bool:
    """Return whether `one_step` computes a call, which is on a CPU and names no kernel.

    Args:
        x: The input.
        kernel: The layer's kernel: a name or "auto".
    """
    return x.is_cpu and preference(kernel).kernel == AUTO


def steps_in_one_launch(cell: Cell, x: Tensor, dtype: torch.dtype, kernel: str, *, projected: bool) -> bool:
    """Return whether `held_step` computes a call, which names no kernel; `one_call` computes all others.

    Args:
        cell: The cell, as in evaluation mode.
        x: The input [B, I].
        dtype: The dtype of the call.
        kernel: The layer's kernel: a name or "auto".
        projected: Whether the layers have projections.
    """
    return not x.is_meta and preference(kernel).kernel == AUTO and in_one_launch(cell, x, dtype, projected)


def dtype_of_call(x: Tensor) -> torch.dtype:
    """Return the dtype in which a step is computed: that of the input, or autocast's."""
    if not torch._C._is_any_autocast_enabled() or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


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


def held_step(held: SingleSteps, x: Tensor, weights: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the output of a step whose states are held on a GPU, and permit the work of first calls in a capture.

    Args:
        held: The steps.
        x: The input [B, I], in the dtype of the steps.
        weights: The weights of each layer, as in `all_weights`, in the same dtype.
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        with first_calls_permitted():
            return held.step(x, weights)
    return held.step(x, weights)


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

"""Plain calls on a CPU, which are computed from the caller's own tensors.

A step of a small layer takes a few microseconds, so that nothing is done here but the products and the operators of the
cell. Without gradients these operators overwrite the products. With gradients, autograd records a call of one step: the
explicit backward pass is faster only because it computes the weight gradients of many steps together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from gatewise.cells.cell import Cell
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator
from gatewise.contract.masks import draws_masks
from gatewise.contract.problem import Layout, Problem
from gatewise.derivation.gates import step_by_gates
from gatewise.derivation.trace import is_pointwise
from gatewise.kernels.eager.blocks import has_adjoint
from gatewise.kernels.eager.staged import StagedSteps

Tensors = Sequence[Tensor]
Direction = Callable[[Tensor, Tensors, Tensors, bool], tuple[list[Tensor], Tensors]]
"""A function of the input [T, B, I], the initial states [B, H], the weights of a direction in PyTorch's order, and
whether it is the reverse one. It returns the hidden state of every step [B, H] in the order of time, and all states
after the last step."""


def operator_of(problem: Problem, device: Device) -> Operator | None:
    """Return a function that computes the calls of a problem, or None for a problem that needs more.

    Args:
        problem: The problem.
        device: The device.
    """
    usual = device.kind == "cpu" and problem.dtype in (torch.float32, torch.float64) and problem.layout is Layout.DENSE
    if not usual or problem.resets or problem.proj_size or problem.projected or draws_masks(problem):
        return None
    if not isinstance(problem.time, int) or problem.time == 0 or not has_adjoint(problem.cell):
        return None
    by_gates = is_pointwise(problem.cell)
    if not problem.needs_grad:
        direction = _overwriting if by_gates else _staged
    elif problem.time == 1 and by_gates and not problem.lean:
        direction = _recorded
    else:
        return None
    return functools.partial(_call, problem, functools.partial(direction, problem.cell, 4 if problem.bias else 2))


def _call(
    problem: Problem, run: Direction, x: Tensor, h0: Tensor, c0: Tensor, weights: Tensors, batch_sizes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, h_n and c_n of a call, as `Operator` says."""
    count, directions, states = problem.weights_per_direction, problem.num_directions, len(problem.cell.states)
    h_n, c_n, outputs = [], [], []
    for row in range(problem.num_layers * directions):
        initial = (h0[row], *(c0[row].chunk(states, -1) if states else ()))
        own = weights[row * count : (row + 1) * count]
        hidden, (h, *others) = run(x, initial, own, row % directions == 1)
        outputs.append(torch.stack(hidden))
        h_n.append(h)
        if states:
            c_n.append(others[0] if states == 1 else torch.cat(others, -1))
        if len(outputs) == directions:
            x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
            outputs = []
    # Stacking copies the states, which may be views of the products of the last step.
    return x, torch.stack(h_n), torch.stack(c_n) if states else c0


def _overwriting(
    cell: Cell, count: int, x: Tensor, states: Tensors, weights: Tensors, reverse: bool
) -> tuple[list[Tensor], Tensors]:
    step, w_hh, parameters, outputs = step_by_gates(cell, True), weights[1].t(), weights[count:], []
    products = linear(x, weights[0], _bias_of_inputs(cell, count, weights)).unbind(0)
    if cell.apart:
        for product in reversed(products) if reverse else products:
            recurrent = torch.mm(states[0], w_hh) if count == 2 else torch.addmm(weights[3], states[0], w_hh)
            states = step(product, recurrent, *states, *parameters)
            outputs.append(states[0])
    else:
        for product in reversed(products) if reverse else products:
            states = step(product.addmm_(states[0], w_hh), *states, *parameters)
            outputs.append(states[0])
    return outputs[::-1] if reverse else outputs, states


def _staged(
    cell: Cell, count: int, x: Tensor, states: Tensors, weights: Tensors, reverse: bool
) -> tuple[list[Tensor], Tensors]:
    products = linear(x, weights[0], _bias_of_inputs(cell, count, weights))
    if reverse:
        products = products.flip(0)
    bias = weights[3] if cell.apart and count == 4 else None
    step, outputs = StagedSteps(cell, weights[1], bias, products, weights[count:], (), keep=False), []
    for t in range(len(products)):
        states = step(t, states[0], states)
        outputs.append(states[0])
    return outputs[::-1] if reverse else outputs, states


def _recorded(
    cell: Cell, count: int, x: Tensor, states: Tensors, weights: Tensors, reverse: bool
) -> tuple[list[Tensor], Tensors]:
    """Compute a single step by operators that autograd records; both directions are the same."""
    product, step = linear(x[0], weights[0], _bias_of_inputs(cell, count, weights)), step_by_gates(cell, False)
    if cell.apart:
        recurrent = linear(states[0], weights[1], weights[3] if count == 4 else None)
        states = step(product, recurrent, *states, *weights[count:])
    else:
        states = step(torch.addmm(product, states[0], weights[1].t()), *states, *weights[count:])
    return [states[0]], states


def _bias_of_inputs(cell: Cell, count: int, weights: Tensors) -> Tensor | None:
    """Return the bias of the input products: both biases, unless the recurrent products are computed apart."""
    if count == 2:
        return None
    return weights[2] if cell.apart else weights[2] + weights[3]

"""Plain calls on a CPU, which are computed from the caller's own tensors.

A step of a small layer takes a few microseconds, so that nothing is done here but the products and the operators of the
cell. Without gradients these operators overwrite the products. With gradients, autograd records the operators where
this takes less time than the explicit passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from gatewise.cells.cell import Cell
from gatewise.cells.step import next_states
from gatewise.contract import ranking
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator
from gatewise.contract.masks import draws_masks
from gatewise.contract.problem import Layout, Problem
from gatewise.derivation.gates import step_by_gates
from gatewise.derivation.trace import is_pointwise, traced
from gatewise.kernels.eager.blocks import has_adjoint
from gatewise.kernels.eager.staged import StagedSteps

RANKINGS = "eager recorded normalized", "eager recorded"
"""The names of the measured weights for cells that combine hidden units, and for others."""

Tensors = Sequence[Tensor]
Direction = Callable[[Tensor, Tensors, Tensors, bool], tuple[list[Tensor], Tensors]]
"""A function of the input [T, B, I], the initial states [B, H], the weights of a direction in PyTorch's order, and
whether it is the reverse one. It returns the hidden state of every step [B, H] in the order of time, and all states
after the last step."""
Step = Callable[..., Tensors]
"""A function of a step with the arguments and results of `step_by_gates`."""


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
    if problem.needs_grad:
        return recorded(problem) if not problem.lean and is_recorded(problem, device) else None
    cell, count = problem.cell, 4 if problem.bias else 2
    if is_pointwise(cell):
        return _call_of(problem, functools.partial(_overwriting, cell, step_by_gates(cell, True), count))
    return _call_of(problem, functools.partial(_staged, cell, count))


def recorded(problem: Problem) -> Operator:
    """Return the function of a call that autograd records."""
    direction = functools.partial(_recorded, problem.cell, _recorded_step(problem.cell), 4 if problem.bias else 2)
    return _call_of(problem, direction)


def is_recorded(problem: Problem, device: Device) -> bool:
    """Return whether a call with gradients takes less time if autograd records it than by the explicit passes.

    The explicit backward pass computes the gradient of the recurrent weights in one product for all steps, instead of
    adding one matrix in each step after the first. It computes more for each element of the states, and prepares more
    for each call. Autograd keeps up to twice as much memory, so that it records no calls with more elements than a
    limit.

    Args:
        problem: The problem.
        device: The device.
    """
    if not _has_all_gradients(problem.cell):
        return False
    weights = ranking.weights(device, ranking_of(problem.cell))
    directions = problem.num_layers * problem.num_directions
    steps = directions * problem.time
    elements = steps * problem.batch * problem.hidden_size
    added = (steps - directions) * problem.gate_rows * problem.hidden_size
    each = steps * weights["steps"] + added * weights["added"]
    return elements <= weights["most elements"] and weights["calls"] + elements * weights["elements"] > each


@functools.lru_cache(maxsize=256)
def _has_all_gradients(cell: Cell) -> bool:
    """Return whether every state depends on the sums, and a state on every parameter.

    Otherwise autograd finds no gradient of some weights, where the explicit passes compute zeros. After a single step
    it still finds none of a parameter whose state is not in the loss, such as a peephole of the output gate for a loss
    of the cell state alone; neither does a loop over the cell's step.
    """
    step = traced(cell)
    of_sums, read = set(step.sums), set()
    for operation in step.operations:
        read.update(operation.operands)
        if not of_sums.isdisjoint(operation.operands):
            of_sums.add(operation.name)
    return of_sums.issuperset((step.hidden, *step.after)) and read.issuperset(step.parameters)


def ranking_of(cell: Cell) -> str:
    """Return the name of the measured weights by which `is_recorded` decides for a cell."""
    return RANKINGS[is_pointwise(cell)]


def _call_of(problem: Problem, run: Direction) -> Operator:
    """Return the function of a call that computes each direction of each layer by `run`."""
    cell, batch_shape = problem.cell, (problem.batch, problem.hidden_size)
    count, directions, states = problem.weights_per_direction, problem.num_directions, len(cell.states)
    rows, values = problem.num_layers * directions, [cell.initial_value(name) for name in ("h", *cell.states)]
    distinct = list(dict.fromkeys(values))
    places = [distinct.index(value) for value in values]

    def call(
        x: Tensor, h0: Tensor | None, c0: Tensor | None, weights: Tensors, batch_sizes: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        initial: Tensors = ()
        if h0 is None or c0 is None:
            # Nothing writes to the initial states, so that equal ones are one tensor.
            made = [x.new_full(batch_shape, value) for value in distinct]
            initial = [made[place] for place in places]
        h_n, c_n, outputs = [], [], []
        for row in range(rows):
            if h0 is not None and c0 is not None:
                initial = h0[row], *_separated(states, c0[row])
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
        last = torch.stack(h_n)
        return x, last, torch.stack(c_n) if states else last

    return call


def _separated(states: int, c: Tensor) -> Tensors:
    """Return the states other than the hidden one [B, H] from all of them side by side [B, S*H]."""
    return (c,) if states == 1 else c.chunk(states, -1) if states else ()


def _overwriting(
    cell: Cell, step: Step, count: int, x: Tensor, states: Tensors, weights: Tensors, reverse: bool
) -> tuple[list[Tensor], Tensors]:
    w_hh, parameters, outputs = weights[1].t(), weights[count:], []
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
    cell: Cell, step: Step, count: int, x: Tensor, states: Tensors, weights: Tensors, reverse: bool
) -> tuple[list[Tensor], Tensors]:
    w_hh, parameters, outputs = weights[1].t(), weights[count:], []
    products = linear(x, weights[0], _bias_of_inputs(cell, count, weights)).unbind(0)
    for product in reversed(products) if reverse else products:
        if cell.apart:
            recurrent = torch.mm(states[0], w_hh) if count == 2 else torch.addmm(weights[3], states[0], w_hh)
            states = step(product, recurrent, *states, *parameters)
        else:
            states = step(torch.addmm(product, states[0], w_hh), *states, *parameters)
        outputs.append(states[0])
    return outputs[::-1] if reverse else outputs, states


@functools.lru_cache(maxsize=256)
def _recorded_step(cell: Cell) -> Step:
    """Return the step of a cell with the arguments of `step_by_gates`: the generated one, or the cell's own."""
    if is_pointwise(cell):
        return step_by_gates(cell, False)
    return functools.partial(_own_step, cell)


def _own_step(cell: Cell, inputs: Tensor, *given: Tensor) -> Tensors:
    """Call the cell's own step with the arguments of `step_by_gates`."""
    own = dict(zip(cell.gates, inputs.chunk(len(cell.gates), -1), strict=True))
    sums = own
    if cell.apart:
        products, *given = given  # type: ignore[assignment]
        sums = {}
        for gate, product in zip(cell.gates, products.chunk(len(cell.gates), -1), strict=True):
            if gate in cell.apart:
                sums |= {f"{gate}_input": own[gate], f"{gate}_recurrent": product}
            else:
                sums[gate] = own[gate] + product
    names = ("h", *cell.states)
    learned = dict(zip(cell.parameters, given[len(names) :], strict=True))
    hidden, after = next_states(cell, sums, dict(zip(names, given, strict=False)), learned)
    return hidden, *after


def _bias_of_inputs(cell: Cell, count: int, weights: Tensors) -> Tensor | None:
    """Return the bias of the input products: both biases, unless the recurrent products are computed apart."""
    if count == 2:
        return None
    return weights[2] if cell.apart else weights[2] + weights[3]

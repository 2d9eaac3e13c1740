"""The backward pass through time: one element-wise launch and one recurrent product per time step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.saved import OutputGradients, Result
from gatewise.kernels.carried import carried_size, carries_hidden
from gatewise.kernels.cuda.scratch import Allocator
from gatewise.kernels.stack import Layer
from gatewise.kernels.stepwise.launch import Backward, BackwardProjection, Launch, address
from gatewise.kernels.stepwise.parameters import (
    dropped,
    factors_of,
    masks_of,
    parameter_sums,
    parameters_of,
    statistics_count,
)
from gatewise.kernels.stepwise.plan import Products, memory_bytes, products_of, starts_early
from gatewise.kernels.stepwise.product_layout import ProductLayout
from gatewise.kernels.stepwise.products import backward_weights, gradients_of_a_step, left_operand, product, state_dtype
from gatewise.kernels.stepwise.recording import key_of, recorder
from gatewise.kernels.sums import recurrent_runs


class LoopGradients(NamedTuple):
    """The gradients that the loop over time computes.

    Attributes:
        dgates: The gradients of the gate sums of all steps [D, T, B, S*H], zero after the end of each sequence.
        dh0: The gradient of the initial hidden states [D, B, R]; None if not requested.
        dc0: The gradient of the initial carried states [D, B, C*H].
        dprojected: The gradients of the projected hidden states of all steps [D, T, B, P]; None without a projection.
        dparameters: The gradients of the cell's parameters, for each sequence [D, B, P, H]; None without parameters.
    """

    dgates: Tensor
    dh0: Tensor | None
    dc0: Tensor
    dprojected: Tensor | None
    dparameters: Tensor | None


class StepBuffers(NamedTuple):
    """The buffers that the products and launches of all steps share.

    Attributes:
        dgates: The gradients of one step's recurrent sums [D, G, B, H], in the layout that the product reads.
        through: The result of the product [D, parts, B, R]: the gradient of the hidden state before the step, as
            partial sums.
        dcell: The gradients of the carried states [D, B, C*H], in float32 for 16-bit dtypes.
    """

    dgates: Tensor
    through: Tensor
    dcell: Tensor

    @classmethod
    def empty(cls, problem: Problem, layout: ProductLayout, memory: Allocator) -> StepBuffers:
        """Return uninitialized buffers for one layer."""
        directions, batch, size, dtype = problem.num_directions, problem.batch, problem.hidden_size, problem.dtype
        return cls(
            gradients_of_a_step(layout, memory, directions, len(problem.cell.gates), batch, size, dtype),
            layout.planes(memory, directions, layout.split_k, batch, problem.state_size, dtype=dtype),
            layout.planes(memory, directions, batch, carried_size(problem), dtype=state_dtype(dtype)),
        )


def run(
    problem: Problem,
    layout: ProductLayout,
    layer: Layer,
    result: Result,
    above: OutputGradients,
    lengths: Tensor | None,
    *,
    state: bool,
) -> LoopGradients:
    """Run the loop over time.

    Args:
        problem: The problem; its number of layers is ignored.
        layout: The layout of states and products.
        layer: The inputs of the layer.
        result: The result of the forward pass. The gradients overwrite its gates, except in a call that is traced by
            `torch.compile`, where the kept tensors may be used again.
        above: The gradients of the outputs.
        lengths: The lengths of the sequences [B], int64, on the device; None if all sequences have T steps.
        state: Whether to compute the gradient of the initial hidden states.
    """
    gates, cells = result.kept[:2]
    directions, time = gates.shape[:2]
    written = torch.empty_like(gates) if problem.traced else gates
    c0, dy = layout.arranged(layer.c0), _output_gradient(layout, above.y, directions)
    dh_n = None if above.h_n is None else layout.arranged(above.h_n)
    recurrent = [weights.w_hh for weights in layer.weights]
    with recorder(gates.device, 0 if problem.proj_size else time, memory_bytes(problem)) as tape:
        memory = StepBuffers.empty(problem, layout, tape or gates)
        memory.dcell.zero_() if above.c_n is None else memory.dcell.copy_(above.c_n)
        projection = _projection(layout, layer, memory, dy, dh_n, lengths, time) if problem.proj_size else None
        arguments = _arguments(problem, layout, memory, gates, written, cells, c0, lengths)
        if projection is None:
            arguments.dh_n = address(dh_n)
            _place_output_gradient(layout, arguments, dy)
        else:
            arguments.product, arguments.whole, arguments.parts = address(projection.dhidden), 1, 1
            arguments.product_direction = projection.dhidden.stride(0)
        parameters, dparameters = parameters_of(layer), parameter_sums(problem, gates)
        arguments.resets, arguments.parameters = address(layer.resets), address(parameters)
        arguments.dparameters = address(dparameters)
        masks, factors = masks_of(layer), factors_of(problem, layer)
        arguments.masks, arguments.factors = address(masks), address(factors)
        arguments.directions = directions
        if statistics_count(problem):
            arguments.statistics = address(result.kept[2])
        early = starts_early(problem, Device.probe(gates.device))
        flags = {"early": early, "resets": layer.resets is not None}
        planes = memory.dcell[..., : problem.hidden_size]
        launch = Launch("backward", "step_backward", layout, planes, problem.dtype, problem.cell, **flags)
        weights = backward_weights(layout, recurrent, tape)
        zeros = (tape or gates) if products_of(problem) is Products.EXACT else None
        multiply = product(left_operand(layout, memory.dgates), weights, memory.through.flatten(0, 1), zeros)

        def one_step(launch_step: Callable[[int], None], step: int) -> None:
            if projection is not None:
                projection.step(step)
            launch_step(step)
            multiply()

        if tape is None:
            for step in range(time):
                one_step(lambda number: launch(arguments, number), step)
        else:
            tape.play(key_of("backward", problem, layout), launch, arguments, one_step)
        dh0 = _initial_gradient(problem, memory, written, lengths, dh_n, multiply, factors) if state else None
        if dh0 is not None and carries_hidden(problem):
            dh0 += memory.dcell[..., -problem.hidden_size :]
        dc0 = memory.dcell.to(problem.dtype, memory_format=torch.contiguous_format, copy=True)
    return LoopGradients(written, dh0, dc0, None if projection is None else projection.written, dparameters)


def first_steps(share: Tensor, lengths: Tensor | None, direction: int) -> Tensor:
    """Return the gradients of each sequence's first step in the order of a direction [B, S*H].

    Args:
        share: The gradients of all steps of the direction [T, B, S*H].
        lengths: The lengths of the sequences [B]; None if all sequences have T steps.
        direction: 0 for the forward direction, 1 for the reverse direction.
    """
    if direction == 0:
        return share[0]
    if lengths is None:
        return share[-1]
    # The reverse direction starts at the last step of each sequence. The gradients of a sequence of length 0 are zero.
    return share[(lengths - 1).clamp(min=0), torch.arange(share.shape[1], device=share.device)]


def _initial_gradient(
    problem: Problem,
    memory: StepBuffers,
    dgates: Tensor,
    lengths: Tensor | None,
    dh_n: Tensor | None,
    multiply: Callable[[], object],
    factors: Tensor | None,
) -> Tensor:
    # The loop ends with the first step of each sequence, except in the reverse direction for sequences shorter than T,
    # whose first step in that direction is at an earlier iteration.
    if lengths is not None and len(dgates) == 2:
        first = first_steps(dgates[1], lengths, 1)
        recurrent = first.unflatten(1, (len(problem.cell.sums), -1)).transpose(0, 1)
        for run in recurrent_runs(problem.cell):
            into = memory.dgates[1, run.gates : run.gates + run.number]
            into.copy_(recurrent[run.sums : run.sums + run.number])
        multiply()
    dh0 = memory.through.sum(1) if memory.through.shape[1] > 1 else memory.through[:, 0]
    dh0 = dropped(dh0.clone(memory_format=torch.contiguous_format), factors)
    if lengths is None:
        return dh0
    return torch.where((lengths > 0).unsqueeze(1), dh0, 0 if dh_n is None else dh_n)


def _arguments(
    problem: Problem,
    layout: ProductLayout,
    memory: StepBuffers,
    gates: Tensor,
    written: Tensor,
    cells: Tensor,
    c0: Tensor,
    lengths: Tensor | None,
) -> Backward:
    time, batch, size = problem.time, problem.batch, problem.hidden_size
    outer, inner = layout.axes(batch, size)
    return Backward(
        gates=address(gates),
        written=address(written),
        dgates=address(memory.dgates),
        cells=address(cells),
        c0=address(c0),
        product=address(memory.through),
        dcell=address(memory.dcell),
        lengths=address(lengths),
        gates_direction=gates.stride(0),
        gates_time=gates.stride(1),
        gates_outer=layout.outer(gates),
        gates_gate=size * gates.stride(3),
        dgates_direction=memory.dgates.stride(0),
        dgates_outer=layout.outer(memory.dgates),
        dgates_gate=memory.dgates.stride(1),
        product_direction=memory.through.stride(0),
        product_part=memory.through.stride(1),
        parts=layout.split_k,
        time=time,
        outer=outer,
        inner=inner,
    )


class _Projection(NamedTuple):
    """The backward pass of the projection.

    Attributes:
        step: A function that computes `dhidden` for a step, given its number.
        dhidden: The gradient of the hidden state before the projection [D, B, H].
        written: The gradients of the projected states of all steps [D, T, B, P].
    """

    step: Callable[[int], None]
    dhidden: Tensor
    written: Tensor


def _projection(
    layout: ProductLayout,
    layer: Layer,
    memory: StepBuffers,
    dy: Tensor | None,
    dh_n: Tensor | None,
    lengths: Tensor | None,
    time: int,
) -> _Projection:
    directions, _, batch, size = memory.through.shape
    weights = torch.stack([weights.w_hr for weights in layer.weights if weights.w_hr is not None])
    dprojected = torch.empty_like(memory.through[:, 0])
    dhidden = memory.dgates.new_empty(directions, batch, weights.shape[2])
    written = memory.dgates.new_empty(directions, time, batch, size)
    multiply = product(dprojected, weights, dhidden)
    launch = Launch("projection", "project_backward", layout, dprojected, dprojected.dtype)
    arguments = BackwardProjection(
        product=address(memory.through),
        dh_n=address(dh_n),
        dhidden=address(dprojected),
        written=address(written),
        lengths=address(lengths),
        time=time,
        outer=batch,
        inner=size,
    )
    _place_output_gradient(layout, arguments, dy)

    def step(number: int) -> None:
        launch(arguments, number)
        multiply()

    return _Projection(step, dhidden, written)


def _output_gradient(layout: ProductLayout, dy: Tensor | None, directions: int) -> Tensor | None:
    """Return the gradient of the outputs as a view or copy [T, B, D, R] in the layout that the launches read."""
    if dy is None:
        return None
    dy = dy.unflatten(-1, (directions, -1))
    if layout.column_major:
        return dy.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return layout.arranged(dy)


def _place_output_gradient(layout: ProductLayout, arguments: Backward | BackwardProjection, dy: Tensor | None) -> None:
    if dy is None:
        return
    arguments.dy = address(dy)
    arguments.dy_time, arguments.dy_direction = dy.stride(0), dy.stride(2)
    arguments.dy_outer = dy.stride(3) if layout.column_major else dy.stride(1)

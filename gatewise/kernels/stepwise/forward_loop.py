"""The forward pass through time: one recurrent product and one element-wise launch per time step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.carried import carried_size
from gatewise.kernels.cuda.scratch import Allocator
from gatewise.kernels.stack import Layer, stacked
from gatewise.kernels.stepwise.launch import Forward, ForwardProjection, Launch, address
from gatewise.kernels.stepwise.parameters import (
    dropped,
    factors_of,
    kept_dtype,
    masks_of,
    parameters_of,
    statistics_of,
)
from gatewise.kernels.stepwise.plan import Products, memory_bytes, products_of, starts_early
from gatewise.kernels.stepwise.product_layout import ProductLayout
from gatewise.kernels.stepwise.products import forward_weights, product, state_dtype
from gatewise.kernels.stepwise.recording import key_of, recorder


class LoopOutputs(NamedTuple):
    """The outputs of the loop over time.

    Attributes:
        y: The outputs [T, B, D * R].
        h_n: The final hidden states [D, B, R].
        c_n: The final values of the carried states [D, B, C*H].
        cells: The carried states of all steps [D, T, B, C*H]; None if no backward pass follows.
        further: Another tensor for the backward pass: the hidden states before the projection [D, T, B, H], or the
            statistics of a cell that combines hidden units [D, T, B, count]; None without either, or if no backward
            pass follows.
    """

    y: Tensor
    h_n: Tensor
    c_n: Tensor
    cells: Tensor | None
    further: Tensor | None


class StepBuffers(NamedTuple):
    """The buffers that the products and launches of all steps share.

    Attributes:
        hidden: The hidden state, an operand of the next product [D, B, R], with recurrent dropout applied.
        cell: The carried states [D, B, C*H], in float32 for 16-bit dtypes.
        sums: The recurrent product of one step [D, B, G*H].
    """

    hidden: Tensor
    cell: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, problem: Problem, layout: ProductLayout, memory: Allocator) -> StepBuffers:
        """Return uninitialized buffers for one layer."""
        directions, batch, dtype = problem.num_directions, problem.batch, problem.dtype
        return cls(
            layout.planes(memory, directions, batch, problem.state_size, dtype=dtype),
            layout.planes(memory, directions, batch, carried_size(problem), dtype=state_dtype(dtype)),
            layout.planes(memory, directions, batch, problem.gate_rows, dtype=dtype),
        )


def run(
    problem: Problem,
    layout: ProductLayout,
    layer: Layer,
    gates: Tensor,
    biases: list[Tensor | None],
    lengths: Tensor | None,
) -> LoopOutputs:
    """Run the loop over time.

    Args:
        problem: The problem; its number of layers is ignored.
        layout: The layout of states and products.
        layer: The inputs of the layer.
        gates: The gate sums of all steps [D, T, B, S*H]. The first G*H columns contain the input products. If a
            backward pass follows, they are overwritten by the values that it needs, such as activated gates.
        biases: The bias of each gate sum, one tensor [S*H] for each direction; None in place of each without biases.
        lengths: The lengths of the sequences [B], int64, on the device; None if all sequences have T steps.
    """
    directions, time, batch, _ = gates.shape
    size, dtype, projected = problem.hidden_size, problem.dtype, problem.proj_size > 0
    states = (directions, time, batch, size)
    y = _outputs(layout, gates, time, batch, directions, problem.state_size)
    cells = None
    if problem.needs_grad:
        cells = layout.planes(gates, *states[:3], carried_size(problem), dtype=kept_dtype(problem))
    statistics = statistics_of(problem, gates) if problem.needs_grad else None
    unprojected = layout.planes(gates, *states, dtype=dtype) if problem.needs_grad and projected else None
    bias = _launched_bias(problem, layout, biases)
    recurrent = [weights.w_hh for weights in layer.weights]
    masks, factors = masks_of(layer), factors_of(problem, layer)
    undropped = None if factors is None else layer.h0.clone(memory_format=torch.contiguous_format)
    with recorder(gates.device, 0 if projected else time, memory_bytes(problem)) as tape:
        memory = StepBuffers.empty(problem, layout, tape or gates)
        memory.hidden.copy_(dropped(layer.h0, factors))
        memory.cell.copy_(layer.c0)
        zeros = (tape or gates) if products_of(problem) is Products.EXACT else None
        multiply = product(memory.hidden, forward_weights(layout, recurrent, tape), memory.sums, zeros)
        early = starts_early(problem, Device.probe(gates.device))
        flags = {"early": early, "resets": layer.resets is not None}
        launch = Launch("forward", "step_forward", layout, memory.cell[..., :size], dtype, problem.cell, **flags)
        if projected:
            outputs = None if unprojected is None else unprojected.permute(1, 2, 0, 3)
            # With a projection, the element-wise launch writes to a separate buffer, which the projection then reads.
            own = gates.new_zeros(directions, batch, size)
            arguments = _arguments(problem, layout, memory, own, gates, outputs, cells, bias, lengths)
            project = _projection(layout, layer, own, memory.hidden, y, lengths)
        else:
            arguments = _arguments(problem, layout, memory, memory.hidden, gates, y, cells, bias, lengths)
            project = None
        parameters = parameters_of(layer)
        arguments.resets, arguments.parameters = address(layer.resets), address(parameters)
        arguments.statistics, arguments.masks = address(statistics), address(masks)
        arguments.factors, arguments.undropped = address(factors), address(undropped)
        arguments.directions = directions

        def one_step(launch_step: Callable[[int], None], step: int) -> None:
            multiply()
            launch_step(step)
            if project is not None:
                project(step)

        if tape is None:
            for step in range(time):
                one_step(lambda number: launch(arguments, number), step)
        else:
            tape.play(key_of("forward", problem, layout), launch, arguments, one_step)
        # These are copies, because the next call overwrites the buffers.
        h_n = memory.hidden.clone(memory_format=torch.contiguous_format) if undropped is None else undropped
        c_n = memory.cell.to(dtype, memory_format=torch.contiguous_format, copy=True)
    return LoopOutputs(y.flatten(2), h_n, c_n, cells, unprojected if statistics is None else statistics)


def _arguments(
    problem: Problem,
    layout: ProductLayout,
    memory: StepBuffers,
    own: Tensor,
    gates: Tensor,
    outputs: Tensor | None,
    cells: Tensor | None,
    bias: Tensor | None,
    lengths: Tensor | None,
) -> Forward:
    time, batch, size = problem.time, problem.batch, problem.hidden_size
    outer, inner = layout.axes(batch, size)
    arguments = Forward(
        gates=address(gates),
        product=address(memory.sums),
        bias=address(bias),
        hidden=address(own),
        cell=address(memory.cell),
        output=address(outputs),
        cells=address(cells),
        lengths=address(lengths),
        gates_direction=gates.stride(0),
        gates_time=gates.stride(1),
        gates_outer=layout.outer(gates),
        gates_gate=size * gates.stride(3),
        product_direction=memory.sums.stride(0),
        product_outer=layout.outer(memory.sums),
        product_gate=size * memory.sums.stride(2),
        time=time,
        outer=outer,
        inner=inner,
    )
    if outputs is not None:
        arguments.output_time, arguments.output_direction = outputs.stride(0), outputs.stride(2)
        arguments.output_outer = outputs.stride(3) if layout.column_major else outputs.stride(1)
    return arguments


def _projection(
    layout: ProductLayout, layer: Layer, own: Tensor, hidden: Tensor, y: Tensor, lengths: Tensor | None
) -> Callable[[int], None]:
    """Return a function that computes a step's projected hidden state from the hidden state `own`, given its number."""
    time, batch, _, size = y.shape
    projected = torch.empty_like(hidden)
    weights = torch.stack([weights.w_hr.t() for weights in layer.weights if weights.w_hr is not None])
    multiply = product(own, weights, projected)
    launch = Launch("projection", "project_forward", layout, hidden, hidden.dtype)
    arguments = ForwardProjection(
        product=address(projected),
        hidden=address(hidden),
        output=address(y),
        lengths=address(lengths),
        output_time=y.stride(0),
        output_outer=y.stride(1),
        output_direction=y.stride(2),
        time=time,
        outer=batch,
        inner=size,
    )

    def project(step: int) -> None:
        multiply()
        launch(arguments, step)

    return project


def _outputs(layout: ProductLayout, like: Tensor, time: int, batch: int, directions: int, size: int) -> Tensor:
    """Return an uninitialized tensor [T, B, D, R] for the outputs."""
    if not layout.column_major:
        return like.new_empty(time, batch, directions, size)
    return like.new_empty(time, directions, size, batch).permute(0, 3, 1, 2)


def _launched_bias(problem: Problem, layout: ProductLayout, biases: list[Tensor | None]) -> Tensor | None:
    """Return the biases [D, S*H] that the element-wise kernel adds, or None.

    In column-major layout it adds all biases; in row-major layout only those of sums without an input product, because
    the input products contain the others.
    """
    if not layout.column_major and len(problem.cell.sums) == len(problem.cell.gates):
        return None
    return stacked(biases)

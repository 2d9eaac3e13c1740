"""The kernel `eager`: the operators of a cell, one step after another, in any floating-point dtype.

It has no criteria, so that at least one kernel runs every problem. Double backward repeats its forward pass under
autograd.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import record_function

from gatewise.cells import Cell, Regularised, stated
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator, TensorSpec, Traces, Work, read_again
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.contract.steps import LayerSteps
from gatewise.derivation.trace import refusal_of
from gatewise.kernels import stack
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.eager import adjoint, plain_call, repetition, unroll
from gatewise.kernels.eager.blocks import has_adjoint
from gatewise.kernels.eager.masks import NO_MASKS, DirectionMasks
from gatewise.kernels.eager.reading_order import ReadingOrder

# Counted in unroll.py and adjoint.py for the LSTM: the recurrent product, then sigmoid, tanh, product, sum of products,
# tanh, product; in the adjoint the recurrent product, product, sum of products. Casts (half types) and projection
# products are added below. Operators count the views too, which cost the CPU about as much as a launch.
_FORWARD_LAUNCHES, _FORWARD_VIEWS = 7, 4
_BACKWARD_LAUNCHES, _BACKWARD_VIEWS = 3, 8
_LAYER_OPERATORS = 12
# With resets, each pass selects the hidden state and every other state, or their gradients, at every step.


# Its operators depend on the cell, so a profile shows the passes by these names.
_FORWARD, _BACKWARD = "gatewise::eager_forward", "gatewise::eager_backward"
_NOTHING = contextlib.nullcontext()


def _named(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that a profiler shows by a name; it costs nothing where none is running."""
    return record_function(name) if torch.autograd._profiler_enabled() else _NOTHING


class _Eager:
    """The kernel: PyTorch operators, one time step after another."""

    name = "eager"
    summary = "plain torch operators, any device and float dtype"
    layouts = frozenset({Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS})
    widens_gradients = False
    traces = Traces(frozenset({_FORWARD}), frozenset({_BACKWARD}))

    def sets_up_in_captures(self, problem: Problem) -> bool:
        return False

    def single_use(self, problem: Problem) -> bool:
        return False

    def factor_widths(self, problem: Problem) -> tuple[int, ...]:
        return ()

    def criteria(self) -> Sequence[Criterion]:
        """Return no criteria, because this kernel runs every problem."""
        return ()

    def algorithm(self, problem: Problem, device: Device) -> str:
        """Return a description of the algorithm: the derived operators, or the cell's own step."""
        if refusal := refusal_of(stated(problem.cell)):
            return f"one product and the cell's own step, differentiated by autograd, which keeps all values: {refusal}"
        if not has_adjoint(problem.cell):
            return "one product and the cell's own step, differentiated by autograd, which keeps all values"
        return "one product and a few pointwise operators per step"

    def work(self, problem: Problem, device: Device) -> Work:
        """Return the work; the number of operators is proportional to the number of steps."""
        layers = problem.num_layers * problem.num_directions
        steps, tokens = layers * problem.time, layers * problem.time * problem.batch
        half = unroll.state_dtype(problem.dtype) != problem.dtype
        projected = problem.proj_size > 0
        state_bytes = unroll.state_dtype(problem.dtype).itemsize
        selected = problem.resets * (1 + len(problem.cell.states))
        masked = _mask_operators(problem.cell)
        launches = _FORWARD_LAUNCHES + 2 * half + projected + selected + masked
        flops = problem.matmul_flops
        matrix = problem.gate_rows * problem.state_size * problem.element_bytes
        # Each pointwise operator reads and writes about three tensors of H; two of them work on 4H.
        forward = Work(
            matmul_flops=flops,
            bytes_moved=tokens * problem.hidden_size * (26 * state_bytes + 12 * problem.element_bytes),
            launches=steps * launches + layers * _LAYER_OPERATORS,
            operators=steps * (launches + _FORWARD_VIEWS) + layers * _LAYER_OPERATORS,
        )
        forward += read_again(matrix, steps, device)
        if not problem.needs_grad:
            return forward
        launches = _BACKWARD_LAUNCHES + half + projected + selected + masked
        block = adjoint.block_steps(problem.cell, problem.batch, problem.hidden_size, device.kind)
        blocks = -(-problem.time // block) * layers
        bulk = blocks * adjoint.BLOCK_OPERATORS + layers * _LAYER_OPERATORS
        backward = Work(
            matmul_flops=2 * flops,
            bytes_moved=tokens * problem.hidden_size * (80 * state_bytes + 16 * problem.element_bytes),
            launches=steps * launches + bulk,
            operators=steps * (launches + _BACKWARD_VIEWS) + bulk,
        )
        backward += read_again(matrix, steps, device)
        # With memory="lean" the forward pass is run again.
        return forward + forward + backward if _repeats(problem) else forward + backward

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """Return the kept tensors: outputs of all layers but the last, then `unroll.Kept` of every layer and direction.

        With `memory="lean"`, and for cells without an explicit backward pass, only the outputs are kept, and the
        backward pass repeats each layer's forward pass. Calls that autograd records keep up to twice as much; they are
        small ones on a CPU (`plain_call.is_recorded`).
        """
        if not problem.needs_grad:
            return ()
        output = TensorSpec((problem.time, problem.batch, problem.output_size), problem.dtype)
        directions = problem.num_layers * problem.num_directions
        outputs = (output,) * (problem.num_layers - 1)
        return outputs if _repeats(problem) else outputs + unroll.Kept.specs(problem) * directions

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        """Return the workspace of the pass that needs more, in training usually the backward pass."""
        state_bytes = unroll.state_dtype(problem.dtype).itemsize
        forward = problem.time * problem.batch * 6 * problem.hidden_size * state_bytes
        if not problem.needs_grad:
            return forward
        backward = adjoint.backward_workspace(problem, device.kind)
        if _repeats(problem):  # one direction at a time, with the tensors that the repeated forward pass keeps
            backward += sum(spec.nbytes for spec in unroll.Kept.specs(problem))
        return max(forward, backward)

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        """Run the forward pass, one layer and direction after another."""
        with _named(_FORWARD):
            return stack.forward(problem, inputs, _layer_forward)

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        """Run the backward pass, from the last layer to the first."""
        with _named(_BACKWARD):
            return stack.backward(problem, inputs, result, gradients, needs, _layer_backward)

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        """Return None: the calls that autograd records are those that `operator` computes."""
        return None

    def operator(self, problem: Problem, device: Device) -> Operator | None:
        """Return a function for plain calls on a CPU without gradients, and for those that autograd records."""
        call = plain_call.operator_of(problem, device)
        return None if call is None else functools.partial(_profiled, problem.needs_grad, call)

    def in_graph(self, problem: Problem, device: Device) -> Operator | None:
        return None


def _profiled(needs_grad: bool, call: Operator, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not torch.autograd._profiler_enabled():
        return call(*given)
    with record_function(_FORWARD):
        outputs = call(*given)
    return _NamedInBackward.apply(*outputs) if needs_grad else outputs


eager = _Eager()


def differentiable(problem: Problem, inputs: Inputs) -> Result:
    """Run the forward pass with operators that autograd records and can differentiate any number of times.

    Args:
        problem: The problem; its layout must be one of `eager.layouts`.
        inputs: The inputs, as for `eager.forward`.

    Returns:
        The outputs, attached to autograd's graph; `kept` is empty.
    """
    with _named(_FORWARD):
        result = stack.forward(problem.replace(needs_grad=False), inputs, _layer_forward)
    profiled = torch.autograd._profiler_enabled() and not torch._C._are_functorch_transforms_active()
    if profiled and result.y.requires_grad and not has_adjoint(problem.cell):
        return Result(*_NamedInBackward.apply(*result[:3]))
    return result


def differentiable_steps(problem: Problem, inputs: Inputs) -> tuple[Result, tuple[LayerSteps, ...]]:
    """Run the forward pass as `differentiable` does, and return the values of all steps too, one record for each layer.

    Args:
        problem: The problem; its layout must be one of `eager.layouts`.
        inputs: The inputs, as for `eager.forward`.
    """
    with _named(_FORWARD):
        y, h_n, c_n, kept = stack.forward(problem.replace(needs_grad=True, lean=False), inputs, _layer_steps)
    if torch.autograd._profiler_enabled() and y.requires_grad:
        y, h_n, c_n = _NamedInBackward.apply(y, h_n, c_n)
    sums, states, outputs = problem.cell.sums, problem.cell.states, [*kept[: problem.num_layers - 1], y]
    found, each = [], len(sums) + len(states)
    for index, output in enumerate(outputs):
        start = problem.num_layers - 1 + index * each
        values = kept[start : start + each]
        of_states = dict(zip(("h", *states), (output, *values[len(sums) :]), strict=True))
        found.append(LayerSteps(of_states, dict(zip(sums, values, strict=False))))
    return Result(y, h_n, c_n), tuple(found)


class _NamedInBackward(torch.autograd.Function):
    """The identity, whose backward pass a profiler shows by the name of the kernel's, before autograd's operators."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs."""
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients."""
        with record_function(_BACKWARD):
            return gradients


def _repeats(problem: Problem) -> bool:
    """Return whether the backward pass repeats the forward pass, instead of reading values that it kept."""
    return problem.needs_grad and (problem.lean or not has_adjoint(problem.cell))


def _layer_forward(problem: Problem, layer: stack.Layer) -> Result:
    products = _projected(problem, layer)
    keep = problem.needs_grad and not _repeats(problem)
    runs = [_run(problem, layer, products, direction, keep) for direction in range(len(layer.weights))]
    kept = tuple(tensor for run in runs if run.kept is not None for tensor in (run.kept.sums, *run.kept.states))
    y = runs[0].y if len(runs) == 1 else torch.cat([run.y for run in runs], -1)
    return Result(
        y,
        torch.stack([run.h_n for run in runs]),
        torch.stack([_concatenated(run.states_n, run.h_n) for run in runs]),
        kept,
    )


def _layer_steps(problem: Problem, layer: stack.Layer) -> Result:
    """Run the forward pass of a layer; `kept` is each sum, then each state but the hidden one, in the order of time."""
    products = _projected(problem, layer)
    directions = range(len(layer.weights))
    runs = [_run(problem, layer, products, direction, True) for direction in directions]
    in_time: list[list[torch.Tensor]] = []
    for direction, run in zip(directions, runs, strict=True):
        assert run.kept is not None  # for the type checker: it was asked for
        order = ReadingOrder.of(layer.x, layer.lengths, direction == 1)
        values = [*run.kept.sums.chunk(len(problem.cell.sums), -1), *run.kept.states]
        in_time.append([order.reordered(order.masked(value)).to(layer.x.dtype) for value in values])
    return Result(
        torch.cat([run.y for run in runs], -1),
        torch.stack([run.h_n for run in runs]),
        torch.stack([_concatenated(run.states_n, run.h_n) for run in runs]),
        tuple(torch.cat(value, -1) for value in zip(*in_time, strict=True)),
    )


def _run(
    problem: Problem, layer: stack.Layer, products: tuple[torch.Tensor, ...] | None, direction: int, keep: bool
) -> unroll.Unrolled:
    return unroll.forward(
        problem.cell,
        layer.x if products is None else products[direction],
        layer.h0[direction],
        _split_states(problem, layer.c0[direction]),
        layer.weights[direction],
        reverse=direction == 1,
        lengths=layer.lengths,
        keep=keep,
        projected=products is not None,
        over_tokens=_over_tokens,
        resets=layer.resets,
        masks=_masks_of(problem, layer, direction),
    )


def _mask_operators(cell: Cell) -> int:
    # The product with the mask of the hidden state, and for each mask of steps about four operators.
    return (cell.recurrent_dropout > 0) + 4 * len(cell.of_steps) if isinstance(cell, Regularised) else 0


def _masks_of(problem: Problem, layer: stack.Layer, direction: int) -> DirectionMasks:
    if not isinstance(problem.cell, Regularised):
        return NO_MASKS
    dtype = unroll.state_dtype(problem.dtype)
    return DirectionMasks.of(problem.cell, layer.masks, direction, problem.hidden_size, dtype)


def _over_tokens(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return deep_products.mm(left, right, bias=bias)


def _kept(
    problem: Problem,
    layer: stack.Layer,
    products: tuple[torch.Tensor, ...] | None,
    result: Result,
    direction: int,
) -> unroll.Kept:
    if not problem.lean:
        count = 1 + len(problem.cell.states)
        sums, *states = result.kept[count * direction : count * (direction + 1)]
        return unroll.Kept(sums, tuple(states))
    again = _run(problem, layer, products, direction, True).kept
    assert again is not None  # for the type checker: it was asked for
    return again


def _layer_backward(
    problem: Problem, layer: stack.Layer, result: Result, gradients: OutputGradients, needs: Needs
) -> stack.LayerGradients:
    if not has_adjoint(problem.cell):
        return repetition.backward(problem, layer, gradients, needs, _layer_forward)
    size = problem.state_size
    products = _projected(problem, layer)
    runs = [
        adjoint.backward(
            problem.cell,
            layer.x if products is None else products[direction],
            layer.h0[direction],
            _split_states(problem, layer.c0[direction]),
            weights,
            result.y[..., direction * size : (direction + 1) * size],
            _kept(problem, layer, products, result, direction),
            None if gradients.y is None else gradients.y[..., direction * size : (direction + 1) * size],
            None if gradients.h_n is None else gradients.h_n[direction],
            _split_gradients(problem, None if gradients.c_n is None else gradients.c_n[direction]),
            reverse=direction == 1,
            lengths=layer.lengths,
            needs=needs,
            projected=products is not None,
            over_tokens=_over_tokens,
            resets=layer.resets,
            masks=_masks_of(problem, layer, direction),
        )
        for direction, weights in enumerate(layer.weights)
    ]
    of_x = [run.x for run in runs]
    return stack.LayerGradients(
        stack.summed(of_x) if products is None else _concatenated_gradients(of_x),
        stack.stacked([run.h0 for run in runs]),
        stack.stacked([None if run.states0 is None else _concatenated(run.states0, layer.h0[0]) for run in runs]),
        tuple(gradient for run in runs for gradient in run.weights),
    )


def _projected(problem: Problem, layer: stack.Layer) -> tuple[torch.Tensor, ...] | None:
    """Return the input products of each direction, if x contains them; None otherwise.

    The first layer of such a problem has input weights with no columns; x of every other layer is an ordinary input.
    """
    if not problem.projected or layer.weights[0].w_ih.shape[1]:
        return None
    return layer.x.split(problem.gate_rows, -1)


def _split_states(problem: Problem, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a tensor [B, states * H] into the states of a cell [B, H]."""
    return states.split(problem.hidden_size, -1) if problem.cell.states else ()


def _split_gradients(problem: Problem, gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return (None,) * len(problem.cell.states) if gradients is None else _split_states(problem, gradients)


def _concatenated(states: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Concatenate the states of a cell [B, H] to a tensor [B, states * H]."""
    if not states:
        return like.new_zeros(like.shape[0], 0)
    return states[0] if len(states) == 1 else torch.cat(list(states), -1)


def _concatenated_gradients(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.cat(present, -1) if present else None

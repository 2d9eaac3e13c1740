"""The `cudnn` kernel: explicit forward and backward, with cuDNN's reserve as what is kept between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator, TensorSpec, Traces, Work, read_again
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.pytorch import pytorch_layer
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.contract.weights import copied_together, in_one_buffer
from gatewise.kernels import operators, stack
from gatewise.kernels.cudnn import criteria
from gatewise.kernels.cudnn.weight_buffer import weight_buffer
from gatewise.kernels.stack import Layer, LayerGradients

_PRODUCT_BYTES = 8 << 20
_STRETCH = 256


class _Cudnn:
    """cuDNN's LSTM, GRU and RNN.

    The whole stack is one call, except that explicit passes with dropout call the layers one by one and apply the masks
    between them: cuDNN would draw from a state of its own, which no other kernel could repeat.
    """

    name = "cudnn"
    summary = "cuDNN through PyTorch's operators"
    layouts = frozenset({Layout.DENSE, Layout.PACKED})
    widens_gradients = True
    traces = Traces(frozenset({"aten::_cudnn_rnn"}), frozenset({"aten::_cudnn_rnn_backward"}))

    def sets_up_in_captures(self, problem: Problem) -> bool:
        return not problem.dropout  # explicit passes with dropout take longer than PyTorch's call

    def single_use(self, problem: Problem) -> bool:
        return True  # cuDNN's backward writes into the reserve

    def factor_widths(self, problem: Problem) -> tuple[int, ...]:
        return ()

    def criteria(self) -> Sequence[Criterion]:
        return criteria.CRITERIA

    def algorithm(self, problem: Problem, device: Device) -> str:
        return criteria.algorithm(problem, device)

    def work(self, problem: Problem, device: Device) -> Work:
        passes = 3 if problem.needs_grad else 1
        layers = problem.num_layers * problem.num_directions
        steps = problem.time * layers
        tokens = problem.batch * steps
        # Weights are read once; in training they are also transposed, and gradients are cleared, summed and copied.
        weights = problem.parameter_count * (5 if problem.needs_grad else 1)
        loops = criteria.persistent_loops(problem, device)
        launched, persistent = loops.count(False), loops.count(True)
        # The sums and the states of every step are written and read.
        values = 2 * (len(problem.cell.sums) + len(problem.cell.states) + 1)
        tensors = problem.weights_per_direction * layers if problem.needs_grad else 0
        work = Work(
            matmul_flops=passes * problem.matmul_flops,
            bytes_moved=(passes * values * tokens * problem.hidden_size + weights) * problem.element_bytes,
            # Products over all steps, their sums, and a persistent loop or, at every step, a product and the cell.
            launches=2 * (len(loops) * layers + launched * steps + persistent * layers),
            operators=6 + tensors + (6 if problem.needs_grad else 0),
            exchanges=persistent * steps,
        )
        matrix = problem.gate_rows * problem.state_size * problem.element_bytes
        return work + read_again(matrix, launched * steps, device)

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        if not problem.needs_grad:
            return ()
        tokens = problem.time * problem.batch * problem.num_directions
        projected = problem.hidden_size + problem.proj_size if problem.proj_size else 0

        def reserve(layers: int) -> TensorSpec:
            # Measured with cuDNN 9.19 for LSTMs: gates and cell of every step, and the outputs between layers. A GRU
            # needs its gates, and the recurrent sum that its reset gate multiplies.
            values = len(problem.cell.sums) + len(problem.cell.states)
            features = layers * (values * problem.hidden_size + projected) + (layers - 1) * problem.state_size
            return TensorSpec((tokens * features * problem.element_bytes,), torch.uint8, exact=False)

        if not _layer_by_layer(problem):
            return (reserve(problem.num_layers),)
        output = TensorSpec((problem.time, problem.batch, problem.output_size), problem.dtype)
        return (*[output] * (problem.num_layers - 1), *[reserve(1)] * problem.num_layers)

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        # cuDNN 9.19: a copy of the weights, memory for the library's products of every layer and direction, which run
        # concurrently, and some values of H for every token of a layer. Counted in the peaks of nn.LSTM on an H200
        # (record of `gatewise bench lstm` at commit 191f4af): in 154 of its 156 dense cells not in bf16 this is within
        # 3 %. For other cells the gates are counted; nothing else is known of their workspace.
        tokens = problem.time * problem.batch * problem.num_directions
        layers = problem.num_layers * problem.num_directions
        if criteria.runs_persistent(problem, device):
            values = 22 + 8 / max(problem.time, 1)
        else:
            # Without a backward pass a single layer makes the gates' sums of so many steps at once.
            stretch = min(1.0, _STRETCH / max(problem.time, 1)) if layers == 1 and not problem.needs_grad else 1.0
            sums = len(problem.cell.gates) * stretch
            values = 2 + sums + 10 * problem.num_layers / max(problem.time, 1) + 1.5 * problem.bidirectional
        stored = problem.parameter_count + round(values * tokens * problem.hidden_size)
        return stored * problem.element_bytes + _PRODUCT_BYTES * layers

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        if not (problem.needs_grad or inputs.masks) and (found := self.recorded(problem, inputs)) is not None:
            return found
        if _layer_by_layer(problem):
            return stack.forward(problem, inputs, _layer_forward)
        return _forward(problem, inputs, problem.num_layers)

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        if _layer_by_layer(problem):
            return stack.backward(problem, inputs, result, gradients, needs, _layer_backward)
        return _backward(problem, inputs, result, gradients, needs, problem.num_layers)

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        if problem.float32_gradients:
            return None
        # The backward pass may be the first call of autograd's thread, which a capture permits to explicit passes only.
        if problem.captured and not problem.announced and self.sets_up_in_captures(problem):
            return None
        # PyTorch's own call does the same with less dispatch, as long as it need not repack the weights. Its dropout
        # draws from a state of cuDNN's, which no seed resets.
        if problem.dropout and torch.are_deterministic_algorithms_enabled():
            return None
        if not in_one_buffer(inputs.weights, problem.weights_per_direction):
            return None
        inputs = inputs._replace(h0=inputs.h0.contiguous(), c0=inputs.c0.contiguous())  # cuDNN takes no other
        return operators.call(problem, inputs)

    def operator(self, problem: Problem, device: Device) -> Operator | None:
        return None

    def in_graph(self, problem: Problem, device: Device) -> Operator | None:
        return None


def _layer_by_layer(problem: Problem) -> bool:
    return problem.dropout > 0


def _layer_forward(problem: Problem, layer: Layer) -> Result:
    return _forward(problem, _layer_inputs(layer), 1)


def _layer_backward(
    problem: Problem, layer: Layer, result: Result, gradients: OutputGradients, needs: Needs
) -> LayerGradients:
    found = _backward(problem, _layer_inputs(layer), result, gradients, needs, 1)
    return LayerGradients(found.x, found.h0, found.c0, found.weights)


def _layer_inputs(layer: Layer) -> Inputs:
    flat = tuple(tensor for direction in layer.weights for tensor in direction.tensors())
    return Inputs(layer.x, layer.h0, layer.c0, flat, layer.lengths, layer.batch_sizes)


def _forward(problem: Problem, inputs: Inputs, num_layers: int) -> Result:
    y, h_n, c_n, reserve, _ = torch.ops.aten._cudnn_rnn(
        inputs.x.contiguous(),
        list(inputs.weights),
        problem.weights_per_direction,
        weight_buffer(inputs.weights, problem.weights_per_direction),
        inputs.h0.contiguous(),
        _cell_state(problem, inputs.c0),
        pytorch_layer(problem.cell).cudnn_mode,
        problem.hidden_size,
        problem.proj_size,
        num_layers,
        False,
        0.0,
        problem.needs_grad,
        problem.bidirectional,
        _steps(inputs),
        None,
    )
    if not problem.cell.states:
        c_n = inputs.c0.clone()  # the operator returns a tensor [0]
    return Result(y, h_n, c_n, (reserve,) if problem.needs_grad else ())


def _backward(
    problem: Problem,
    inputs: Inputs,
    result: Result,
    gradients: OutputGradients,
    needs: Needs,
    num_layers: int,
) -> InputGradients:
    weights, states = list(inputs.weights), bool(problem.cell.states)
    dy, dc_n = gradients.y, gradients.c_n if states else None
    if dy is None and gradients.h_n is None and dc_n is None:
        dy = torch.zeros_like(result.y)  # the operator wants one at least
    dx, dh0, dc0, dweights = torch.ops.aten._cudnn_rnn_backward(
        inputs.x.contiguous(),
        weights,
        problem.weights_per_direction,
        weight_buffer(inputs.weights, problem.weights_per_direction),
        inputs.h0.contiguous(),
        _cell_state(problem, inputs.c0),
        result.y,
        dy,
        gradients.h_n,
        dc_n,
        pytorch_layer(problem.cell).cudnn_mode,
        problem.hidden_size,
        problem.proj_size,
        num_layers,
        False,
        0.0,
        True,
        problem.bidirectional,
        _steps(inputs),
        None,
        result.kept[-1],
        [needs.x, needs.state, needs.state and states, needs.weights],
    )
    if needs.weights and problem.float32_gradients:
        dweights = copied_together(dweights, torch.float32)
    return InputGradients(
        dx if needs.x else None,
        dh0 if needs.state else None,
        (dc0 if states else torch.zeros_like(inputs.c0)) if needs.state else None,
        tuple(dweights) if needs.weights else (None,) * len(weights),
    )


def _cell_state(problem: Problem, c0: Tensor) -> Tensor | None:
    # Only cuDNN's LSTM has a cell state; the operators refuse one for other cells.
    return c0.contiguous() if problem.cell.states else None


def _steps(inputs: Inputs) -> list[int]:
    return [] if inputs.batch_sizes is None else inputs.batch_sizes.tolist()


cudnn = _Cudnn()

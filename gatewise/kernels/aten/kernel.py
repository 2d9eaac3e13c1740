"""The kernel `aten`: PyTorch without cuDNN, that is oneDNN where PyTorch uses it, and the native loop otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec, Traces, Work
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.kernels import stack
from gatewise.kernels.aten import native, onednn
from gatewise.kernels.criteria import LENGTHS_READABLE, NOT_EMPTY, NOT_LEAN, NOT_PROJECTED
from gatewise.kernels.skinny import exact_slowdown, waiting_seconds

_TRACEABLE = Criterion(
    "compiled call",
    allowed="problems that oneDNN takes (its state is tensors; the native loop's is an autograd graph)",
    actual=lambda problem, device: f"{problem.dtype} on {device.kind}".replace("torch.", ""),
    holds=lambda problem, device: not (problem.traced and problem.needs_grad) or onednn.takes(problem, device),
    violation=lambda problem, device: (
        problem.replace(traced=True, needs_grad=True, dtype=torch.float64),
        device,
    ),
)


class _Aten:
    """PyTorch's own LSTM without cuDNN, as one kernel with two algorithms."""

    name = "aten"
    summary = "PyTorch without cuDNN: oneDNN or the native loop"
    layouts = frozenset({Layout.DENSE, Layout.PACKED})
    sets_up_in_captures = False
    # In this order: oneDNN; the fused cell of the native loop on a GPU; the split into gates, which is the only
    # operator that identifies the native loop on a CPU.
    traces = Traces(
        frozenset({"aten::mkldnn_rnn_layer", "aten::_thnn_fused_lstm_cell", "aten::unsafe_chunk"}),
        frozenset({"aten::mkldnn_rnn_layer_backward", "aten::_thnn_fused_lstm_cell_backward", "UnsafeSplitBackward0"}),
    )

    def single_use(self, problem: Problem) -> bool:
        return False

    def criteria(self) -> Sequence[Criterion]:
        return (NOT_EMPTY, NOT_PROJECTED, NOT_LEAN, LENGTHS_READABLE, _TRACEABLE)

    def algorithm(self, problem: Problem, device: Device) -> str:
        if onednn.takes(problem, device):
            return "oneDNN, one primitive a layer and direction"
        return "native loop, operators for every step"

    def work(self, problem: Problem, device: Device) -> Work:
        passes = 3 if problem.needs_grad else 1
        layers = problem.num_layers * problem.num_directions
        tokens = problem.time * problem.batch
        traffic = passes * layers * tokens * 12 * problem.hidden_size * problem.element_bytes
        flops = passes * problem.matmul_flops
        if onednn.takes(problem, device):
            steps = layers * problem.time * passes
            return Work(flops, traffic, launches=steps, operators=10 * layers * passes)
        steps = layers * problem.time
        # The products of the input, every step's output, what a step makes of them. (Autograd's graph is what is kept.)
        once = problem.time * problem.batch * problem.num_directions * 5 + 6 * problem.batch
        stored = 0 if problem.needs_grad else once * problem.hidden_size * problem.element_bytes
        if device.kind != "cuda":
            # A cell is about ten operators, which PyTorch issues from C++.
            return Work(flops, 2 * traffic, 10 * steps * passes, 10 * layers * passes, workspace_bytes=stored)
        return _on_gpu(problem, device, Work(flops, 2 * traffic, workspace_bytes=stored))

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        if not problem.needs_grad:
            return ()
        if onednn.takes(problem, device):
            return onednn.kept(problem)
        return native.kept(problem)

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        # If no backward pass follows, PyTorch's operator computes all layers, and uses oneDNN by its own rules.
        if problem.needs_grad and onednn.takes(problem, Device.probe(inputs.x.device)):
            return stack.forward(problem, inputs, onednn.layer_forward)
        return native.forward(problem, inputs)

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        if onednn.takes(problem, Device.probe(inputs.x.device)):
            return stack.backward(problem, inputs, result, gradients, needs, onednn.layer_backward)
        return native.backward(problem, inputs, result, gradients, needs)

    recorded = staticmethod(native.recorded)


def _on_gpu(problem: Problem, device: Device, whole: Work) -> Work:
    # A fused cell beside the recurrent product; in backward two products, and the sum of the weights' gradients over
    # all steps is read and written at each. A training step costs the CPU more than its operators: backward runs on a
    # thread of autograd's own.
    train, layers = problem.needs_grad, problem.num_layers * problem.num_directions
    steps = layers * problem.time
    recurrent = 4 * problem.hidden_size * problem.state_size
    # Weights that are used once come partly from the second-level cache. Fitted to the rows of this kernel in
    # tests/selection/measured.jsonl.
    weights = problem.parameter_count * (3.5 if train else 0.4) + (steps - layers) * recurrent * (4 if train else 0)
    return dataclasses.replace(
        whole,
        matmul_flops=whole.matmul_flops * exact_slowdown(problem),
        bytes_moved=whole.bytes_moved + weights * problem.element_bytes,
        launches=(6 if train else 2) + steps * (7 if train else 2),
        operators=steps * (12 if train else 4) + (60 if train else 5),
        exchanges=round(steps * waiting_seconds(problem) / device.exchange_seconds),
    )


aten = _Aten()

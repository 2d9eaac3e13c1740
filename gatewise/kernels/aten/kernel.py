"""The kernel `aten`: PyTorch without cuDNN, that is oneDNN where PyTorch uses it, and the native loop otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from gatewise.cells import GRU, LSTM, RNN
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator, TensorSpec, Traces, Work, read_again
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.kernels import stack
from gatewise.kernels.aten import native, onednn, runs
from gatewise.kernels.aten.in_graph import in_graph
from gatewise.kernels.criteria import IN_PYTORCH, LENGTHS_READABLE, NO_RESETS, NOT_EMPTY, NOT_LEAN, NOT_PROJECTED

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

# The loop adds to the gradients of weights and biases at each step, in the dtype of the computation. Sums in 16 bits
# lose what is smaller than their last bit: 2 % of the gradient of a bias over 1,135 steps of a GRU. torch.nn.GRU and
# torch.nn.RNN run on cuDNN, which adds in float32.
_SUMMED_IN_FULL = Criterion(
    "dtype",
    allowed=(
        "float32 or float64 in training of a GRU or an RNN on a GPU, because the loop sums gradients of weights in the "
        "dtype"
    ),
    actual=lambda problem, device: f"{problem.dtype}".replace("torch.", ""),
    holds=lambda problem, device: (
        device.kind != "cuda"
        or not problem.needs_grad
        or problem.element_bytes != 2
        or type(problem.cell) not in (GRU, RNN)
    ),
    violation=lambda problem, device: (
        problem.replace(cell=GRU(), proj_size=0, dtype=torch.bfloat16, needs_grad=True),
        device.replace(kind="cuda"),
    ),
)


_PACKED = (Layout.PACKED, Layout.HOST_LENGTHS)


class _Aten:
    """PyTorch's own layers without cuDNN, as one kernel with two algorithms."""

    name = "aten"
    summary = "PyTorch without cuDNN: oneDNN or the native loop"
    layouts = frozenset({Layout.DENSE, Layout.PACKED})
    widens_gradients = False
    # In this order: oneDNN; the fused cell of the native loop on a GPU; the split into gates, which is the only
    # operator that identifies the native loop on a CPU; the product and the nonlinearity of an RNN, whose loop has
    # neither a fused cell nor gates.
    traces = Traces(
        frozenset(
            {
                "aten::mkldnn_rnn_layer",
                "aten::_thnn_fused_lstm_cell",
                "aten::_thnn_fused_gru_cell",
                "aten::unsafe_chunk",
                "aten::linear",
            }
        ),
        frozenset(
            {
                "aten::mkldnn_rnn_layer_backward",
                "aten::_thnn_fused_lstm_cell_backward",
                "aten::_thnn_fused_gru_cell_backward",
                "UnsafeSplitBackward0",
                "TanhBackward0",
                "ReluBackward0",
            }
        ),
    )

    def sets_up_in_captures(self, problem: Problem) -> bool:
        return False

    def single_use(self, problem: Problem) -> bool:
        return False

    def factor_widths(self, problem: Problem) -> tuple[int, ...]:
        return ()

    def criteria(self) -> Sequence[Criterion]:
        shared = IN_PYTORCH, NOT_EMPTY, NOT_PROJECTED, NOT_LEAN, NO_RESETS, LENGTHS_READABLE
        return (*shared, _TRACEABLE, _SUMMED_IN_FULL)

    def algorithm(self, problem: Problem, device: Device) -> str:
        if onednn.takes(problem, device):
            return "oneDNN, one primitive per layer and direction"
        if problem.layout in _PACKED and runs.takes(problem, device):
            return "native loop, or runs of steps with equal batch sizes where that is faster"
        return "native loop, operators for every step"

    def work(self, problem: Problem, device: Device) -> Work:
        passes = 3 if problem.needs_grad else 1
        layers = problem.num_layers * problem.num_directions
        tokens = problem.time * problem.batch
        sums = len(problem.cell.sums)
        traffic = passes * layers * tokens * 3 * sums * problem.hidden_size * problem.element_bytes
        flops = passes * problem.matmul_flops
        if onednn.takes(problem, device):
            steps = layers * problem.time * passes
            return Work(matmul_flops=flops, bytes_moved=traffic, launches=steps, operators=10 * layers * passes)
        steps = layers * problem.time
        if device.kind != "cuda":
            # A gated cell is about ten operators, which PyTorch issues from C++; the cell of an RNN is a product, an
            # addition and the nonlinearity.
            return Work(
                matmul_flops=flops,
                bytes_moved=2 * traffic,
                launches=(3 if type(problem.cell) is RNN else 10) * steps * passes,
                operators=10 * layers * passes,
            )
        work = Work(matmul_flops=flops, bytes_moved=2 * traffic)
        return _on_gpu(problem, device, work)

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        if not problem.needs_grad:
            return ()
        if onednn.takes(problem, device):
            return onednn.kept(problem)
        if type(problem.cell) is LSTM and problem.layout in _PACKED and runs.takes(problem, device):
            return onednn.kept(problem)  # of the runs, if those are chosen; it is more than the native loop keeps
        return native.kept(problem)

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        if problem.needs_grad or onednn.takes(problem, device):
            return 0  # autograd's graph is what is kept
        # The products of the input, every step's output, what a step makes of them.
        sums = len(problem.cell.sums)
        once = problem.time * problem.batch * problem.num_directions * (sums + 1) + 6 * problem.batch
        return once * problem.hidden_size * problem.element_bytes

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        # If no backward pass follows, PyTorch's operator computes all layers, and uses oneDNN by its own rules.
        if problem.needs_grad and onednn.takes(problem, Device.probe(inputs.x.device)):
            return stack.forward(problem, inputs, onednn.layer_forward)
        return native.forward(problem, inputs)

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        # The settings by which the forward pass chose an algorithm may have changed since.
        if onednn.has_kept(result):
            return stack.backward(problem, inputs, result, gradients, needs, onednn.layer_backward)
        return native.backward(problem, inputs, result, gradients, needs)

    recorded = staticmethod(native.recorded)

    def operator(self, problem: Problem, device: Device) -> Operator | None:
        return native.operator_on_cpu(problem) if device.kind == "cpu" else None

    in_graph = staticmethod(in_graph)


def _on_gpu(problem: Problem, device: Device, whole: Work) -> Work:
    # A fused cell beside the recurrent product, or the addition and the nonlinearity of an RNN; in backward two
    # products, and the sum of the weights' gradients over all steps is read and written at each.
    train, layers = problem.needs_grad, problem.num_layers * problem.num_directions
    steps = layers * problem.time
    unfused = type(problem.cell) is RNN
    matrix = problem.gate_rows * problem.state_size * problem.element_bytes
    weights = problem.parameter_count * problem.element_bytes * (4 if train else 1)
    work = dataclasses.replace(
        whole,
        bytes_moved=whole.bytes_moved + weights,
        launches=(6 if train else 2) + steps * ((7 if train else 2) + unfused),
        operators=5 + steps * ((12 if train else 4) + unfused),
    )
    work += read_again(matrix, (2 if train else 1) * steps, device)
    return work + read_again(matrix, 3 * (steps - layers), device) if train else work


aten = _Aten()

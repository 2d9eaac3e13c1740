"""The kernel `stepwise`: one matrix product of the library and one element-wise CUDA kernel for every time step."""

from __future__ import annotations

from collections.abc import Sequence

from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec, Traces, Work
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.kernels import stack
from gatewise.kernels.carried import (
    as_carried,
    carries_hidden,
    gradients_as_carried,
    gradients_without_state,
    without_state,
)
from gatewise.kernels.skinny import slowdown
from gatewise.kernels.stepwise.criteria import CRITERIA
from gatewise.kernels.stepwise.plan import form_of, held_bytes, memory_bytes, runs_of, slow_products_seconds, step


class _Stepwise:
    """The kernel: recurrent products of cuBLAS, and one element-wise CUDA kernel between two of them.

    The weights are read from memory at every step, so that there is no limit on their size.
    """

    name = "stepwise"
    summary = "a library product and an element-wise launch a step"
    layouts = frozenset({Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS})
    sets_up_in_captures = True
    traces = Traces(frozenset({"step_forward"}), frozenset({"step_backward"}))  # entry points in cuda/*.cu

    def single_use(self, problem: Problem) -> bool:
        return True  # the gradients of the gates overwrite the kept gates

    def criteria(self) -> Sequence[Criterion]:
        return CRITERIA

    def algorithm(self, problem: Problem, device: Device) -> str:
        return str(form_of(problem, device))

    def work(self, problem: Problem, device: Device) -> Work:
        layers, directions, passes = problem.num_layers, problem.num_directions, 3 if problem.needs_grad else 1
        tokens = problem.time * problem.batch * directions
        recurrent = 2.0 * problem.gate_rows * problem.state_size * tokens * layers
        launches, calls = 2 + 2 * directions, 6 + 2 * directions
        moved = 6 * problem.hidden_size
        if problem.needs_grad:
            launches += 5 + 5 * directions
            calls += 8 + 7 * directions
            moved += 18 * problem.hidden_size
        # Recorded steps cost the CPU nothing. The time of one is known better than its parts, so it is stated in the
        # unit of what else goes on between multiprocessors without the CPU.
        seconds = layers * problem.time * sum(step(problem, device, form_of(problem, device)))
        seconds += slow_products_seconds(problem, device)
        runs = layers * (1 + problem.needs_grad) * len(runs_of(problem.time))
        return Work(
            matmul_flops=(passes * (problem.matmul_flops - recurrent) + (recurrent if problem.needs_grad else 0))
            * slowdown(problem),
            # Weights are read and turned around, their gradients written, summed and handed over.
            bytes_moved=(layers * tokens * moved + problem.parameter_count * (5 if problem.needs_grad else 0.4))
            * problem.element_bytes,
            launches=layers * launches + 2 * runs,
            # In training autograd's thread doubles the cost of each, and adds its own; a replay is more than launches.
            operators=layers * calls * (4 if problem.needs_grad else 1) + (50 if problem.needs_grad else 0) + runs,
            exchanges=round(seconds / device.exchange_seconds),
            workspace_bytes=self._workspace_bytes(problem),
            held_bytes=held_bytes(problem),
        )

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        if not problem.needs_grad:
            return ()
        tokens = (problem.num_directions, problem.time, problem.batch)
        output = TensorSpec((problem.time, problem.batch, problem.output_size), problem.dtype)
        gates = TensorSpec((*tokens, len(problem.cell.sums) * problem.hidden_size), problem.dtype)
        state = TensorSpec((*tokens, problem.hidden_size), problem.dtype)
        layer_keeps = (gates, state, state) if problem.proj_size else (gates, state)
        return (*[output] * (problem.num_layers - 1), *layer_keeps * problem.num_layers)

    def _workspace_bytes(self, problem: Problem) -> int:
        planes = problem.time * problem.batch * problem.num_directions * problem.hidden_size * problem.element_bytes
        # In inference the gates are not kept; in a traced call the gradients do not overwrite the gates.
        gates = len(problem.cell.sums) * planes if problem.traced or not problem.needs_grad else 0
        # Between two layers: the output of the lower layer, or in training the gradient of that output.
        between = problem.time * problem.batch * problem.output_size * problem.element_bytes
        return memory_bytes(problem) + gates + (between if problem.num_layers > 1 else 0)

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        from gatewise.kernels.stepwise import layer  # imports the compiler, which choosing a kernel does not need

        if not carries_hidden(problem):
            return stack.forward(problem, inputs, layer.forward)
        return without_state(stack.forward(problem, as_carried(inputs), layer.forward))

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        from gatewise.kernels.stepwise import layer

        if not carries_hidden(problem):
            return stack.backward(problem, inputs, result, gradients, needs, layer.backward)
        inputs, gradients = as_carried(inputs), gradients_as_carried(gradients)
        return gradients_without_state(stack.backward(problem, inputs, result, gradients, needs, layer.backward))

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        return None


stepwise = _Stepwise()

"""The algorithm for calls of any number of time steps: in each step, a product of the library and a launch."""

from __future__ import annotations

from gatewise.cells import Regularised, masks_of_steps, step_cell
from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec, Work, read_again
from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.derivation.row import combinations_of
from gatewise.kernels import stack
from gatewise.kernels.carried import (
    as_carried,
    carried_size,
    carries_hidden,
    gradients_as_carried,
    gradients_without_hidden,
    without_hidden,
)
from gatewise.kernels.criteria import is_fused
from gatewise.kernels.stepwise.parameters import kept_dtype, statistics_count
from gatewise.kernels.stepwise.plan import FEWEST_STEPS, held_bytes, memory_bytes, product_layout_of, runs_of
from gatewise.kernels.stepwise.products import state_dtype


class _StepLoop:
    """The algorithm, whose loops over time are in `forward_loop` and `backward_loop`."""

    def description(self, problem: Problem, device: Device) -> str:
        layout = str(product_layout_of(problem, device))
        return layout if is_fused(problem.cell) else f"{layout}, a block of threads for each sequence"

    def work(self, problem: Problem, device: Device) -> Work:
        layers, directions = problem.num_layers, problem.num_directions
        passes, loops = (3, 2) if problem.needs_grad else (1, 1)
        tokens = problem.time * problem.batch * directions
        # Products over all steps, their sums, copies of weights; then at every step a product and a launch, with a
        # projection one product and one launch more, for both directions at once.
        launches = 2 + 2 * directions + (5 + 5 * directions if problem.needs_grad else 0)
        steps = layers * loops * problem.time * (4 if problem.proj_size else 2)
        recorded = problem.time >= FEWEST_STEPS and not problem.proj_size
        runs = layers * loops * len(runs_of(problem.time))
        tensors = problem.weights_per_direction * layers * directions if problem.needs_grad else 0
        work = Work(
            matmul_flops=passes * problem.matmul_flops,
            # Weights are read and transposed, their gradients are written, summed and copied.
            bytes_moved=(
                layers * tokens * (24 if problem.needs_grad else 6) * problem.hidden_size
                + problem.parameter_count * (5 if problem.needs_grad else 1)
            )
            * problem.element_bytes,
            launches=layers * launches + steps,
            replayed=steps if recorded else 0,
            operators=6 + tensors + layers * 2 * launches + (runs if recorded else 0),
            # A block that computes a batch row waits for the row, and at every statistic for its other threads, each
            # time about as long as blocks wait for each other's numbers.
            exchanges=0 if is_fused(problem.cell) else layers * loops * problem.time * (1 + _combinations(problem)),
            held_bytes=held_bytes(problem),
        )
        matrix = 4 * directions * problem.hidden_size * problem.state_size * problem.element_bytes
        return work + read_again(matrix, layers * loops * problem.time, device)

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        if not problem.needs_grad:
            return ()
        tokens = (problem.num_directions, problem.time, problem.batch)
        output = TensorSpec((problem.time, problem.batch, problem.output_size), problem.dtype)
        gates = TensorSpec((*tokens, len(problem.cell.sums) * problem.hidden_size), problem.dtype)
        state = TensorSpec((*tokens, carried_size(problem)), kept_dtype(problem))
        layer_keeps = (gates, state, state) if problem.proj_size else (gates, state)
        if count := statistics_count(problem):
            layer_keeps += (TensorSpec((*tokens, count), state_dtype(problem.dtype)),)
        return (*[output] * (problem.num_layers - 1), *layer_keeps * problem.num_layers)

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        planes = problem.time * problem.batch * problem.num_directions * problem.hidden_size * problem.element_bytes
        # In inference the gates are not kept; in a traced call the gradients do not overwrite the gates.
        gates = len(problem.cell.sums) * planes if problem.traced or not problem.needs_grad else 0
        # Between two layers: the output of the lower layer, or in training the gradient of that output.
        between = problem.time * problem.batch * problem.output_size * problem.element_bytes
        # With resets: the outputs before each step, zero where an episode begins, for the gradient of the weights.
        before = problem.time * problem.batch * problem.state_size * problem.element_bytes
        dropout = isinstance(problem.cell, Regularised) and problem.cell.recurrent_dropout > 0
        masked = before * (problem.resets + dropout) if problem.needs_grad else 0
        tokens = problem.time * problem.batch * problem.num_directions
        masked += masks_of_steps(problem.cell) * tokens * problem.hidden_size  # side by side, a byte each
        if problem.needs_grad:  # the gradients of the cell's parameters, for each sequence, in the dtype of states
            sequences = problem.num_directions * problem.batch * len(problem.cell.parameters)
            masked += sequences * problem.hidden_size * max(4, problem.element_bytes)
        return memory_bytes(problem) + gates + masked + (between if problem.num_layers > 1 else 0)

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        # It imports the compiler, which choosing a kernel does not need.
        from gatewise.kernels.stepwise import layer

        if not carries_hidden(problem):
            return stack.forward(problem, inputs, layer.forward)
        return without_hidden(problem, stack.forward(problem, as_carried(problem, inputs), layer.forward))

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        from gatewise.kernels.stepwise import layer

        if not carries_hidden(problem):
            return stack.backward(problem, inputs, result, gradients, needs, layer.backward)
        inputs, gradients = as_carried(problem, inputs), gradients_as_carried(problem, gradients)
        found = stack.backward(problem, inputs, result, gradients, needs, layer.backward)
        return gradients_without_hidden(problem, found)


def _combinations(problem: Problem) -> int:
    """Return the number of times in a step that units are combined."""
    return combinations_of(step_cell(problem.cell)).places


step_loop = _StepLoop()

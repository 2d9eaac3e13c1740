"""The kernel `stepwise`: in each time step, one matrix product of cuBLAS and one element-wise CUDA kernel."""

from __future__ import annotations

from collections.abc import Sequence

from gatewise.cells import Regularised, masks_of_steps, step_cell
from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator, TensorSpec, Traces, Work, read_again
from gatewise.contract.problem import Layout, Problem
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
from gatewise.kernels.stepwise import padding
from gatewise.kernels.stepwise.criteria import CRITERIA
from gatewise.kernels.stepwise.parameters import kept_dtype, statistics_count
from gatewise.kernels.stepwise.plan import FEWEST_STEPS, held_bytes, memory_bytes, product_layout_of, runs_of
from gatewise.kernels.stepwise.products import state_dtype
from gatewise.kernels.stepwise.single_criteria import MOST_ROWS, is_single_call, is_single_training
from gatewise.kernels.sums import recurrent_runs


class _Stepwise:
    """The kernel: recurrent products of cuBLAS, and one element-wise CUDA kernel between two of them.

    The weights are read from memory at every step, so that there is no limit on their size.
    """

    name = "stepwise"
    summary = "one library product and one element-wise launch per step"
    layouts = frozenset({Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS})
    sets_up_in_captures = True
    widens_gradients = True
    # Entry points in cuda/*.cu.
    traces = Traces(frozenset({"step_forward", "single_call"}), frozenset({"step_backward", "single_adjoint"}))

    def single_use(self, problem: Problem) -> bool:
        # The gradients of the gates overwrite the kept gates; only what single training calls keep could be read twice.
        return True

    def factor_widths(self, problem: Problem) -> tuple[int, ...]:
        return ()

    def criteria(self) -> Sequence[Criterion]:
        return CRITERIA

    def algorithm(self, problem: Problem, device: Device) -> str:
        if is_single_call(problem, device):
            return "one launch for each layer, which computes the products, too"
        if is_single_training(problem, device):
            last = "two backward" if problem.batch <= MOST_ROWS else "one backward beside the library's products"
            return f"one launch forward for each layer, {last}"
        wide = padding.padded(problem, device)
        layout = str(product_layout_of(wide or problem, device))
        if wide is not None:
            layout += f", sizes rounded up to {wide.input_size} and {wide.hidden_size}"
        return layout if is_fused(problem.cell) else f"{layout}, a block of threads for each sequence"

    def work(self, problem: Problem, device: Device) -> Work:
        if is_single_call(problem, device):
            return Work(
                matmul_flops=problem.matmul_flops,
                bytes_moved=problem.parameter_count * problem.element_bytes,
                launches=problem.num_layers,
                operators=3,  # which allocate the results
            )
        if is_single_training(problem, device):
            return _work_of_single_training(problem)
        if (wide := padding.padded(problem, device)) is not None:
            return self.work(wide, device) + padding.work(problem, wide)
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
        if is_single_training(problem, device):
            output = TensorSpec((1, problem.batch, problem.hidden_size), problem.dtype)
            sums = (problem.batch, len(problem.cell.sums) * problem.hidden_size)
            own = TensorSpec(sums, state_dtype(problem.dtype))
            return (*[output] * (problem.num_layers - 1), *[own] * problem.num_layers)
        if (wide := padding.padded(problem, device)) is not None:
            return (padding.kept_output(wide), *self.kept(wide, device))
        tokens = (problem.num_directions, problem.time, problem.batch)
        output = TensorSpec((problem.time, problem.batch, problem.output_size), problem.dtype)
        gates = TensorSpec((*tokens, len(problem.cell.sums) * problem.hidden_size), problem.dtype)
        state = TensorSpec((*tokens, carried_size(problem)), kept_dtype(problem))
        layer_keeps = (gates, state, state) if problem.proj_size else (gates, state)
        if count := statistics_count(problem):
            layer_keeps += (TensorSpec((*tokens, count), state_dtype(problem.dtype)),)
        return (*[output] * (problem.num_layers - 1), *layer_keeps * problem.num_layers)

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        if is_single_call(problem, device):
            return 0
        if is_single_training(problem, device):
            # The gradients of the sums, of the hidden states, and of what lies between two layers; then the states of
            # all layers, before they are joined.
            states = problem.num_layers * (1 + len(problem.cell.states)) if problem.num_layers > 1 else 0
            values = len(problem.cell.sums) + 4 + states
            if problem.batch > MOST_ROWS and len(recurrent_runs(problem.cell)) > 1:
                values += len(problem.cell.gates)  # the gradients of the recurrent products
            return problem.batch * problem.hidden_size * values * problem.element_bytes
        if (wide := padding.padded(problem, device)) is not None:
            return self.workspace_bytes(wide, device) + padding.workspace_bytes(problem, wide)
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
        # They import the compiler, which choosing a kernel does not need.
        from gatewise.kernels.stepwise import layer, single, single_training

        device = Device.probe(inputs.x.device)
        if is_single_call(problem, device):
            return single.single_call(problem, inputs)
        if is_single_training(problem, device):
            return stack.forward(problem, inputs, single_training.forward)
        if (wide := padding.padded(problem, Device.probe(inputs.x.device))) is not None:
            between = padding.Padding(problem, wide)
            return between.result(self.forward(wide, between.inputs(inputs)))
        if not carries_hidden(problem):
            return stack.forward(problem, inputs, layer.forward)
        return without_hidden(problem, stack.forward(problem, as_carried(problem, inputs), layer.forward))

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        from gatewise.kernels.stepwise import layer, single_training

        if is_single_training(problem, Device.probe(inputs.x.device)):
            return stack.backward(problem, inputs, result, gradients, needs, single_training.backward)
        if (wide := padding.padded(problem, Device.probe(inputs.x.device))) is not None:
            between = padding.Padding(problem, wide)
            inputs, gradients = between.inputs(inputs), between.above(gradients)
            return between.gradients(self.backward(wide, inputs, between.kept(result, inputs), gradients, needs))
        if not carries_hidden(problem):
            return stack.backward(problem, inputs, result, gradients, needs, layer.backward)
        inputs, gradients = as_carried(problem, inputs), gradients_as_carried(problem, gradients)
        return gradients_without_hidden(
            problem, stack.backward(problem, inputs, result, gradients, needs, layer.backward)
        )

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        return None

    def operator(self, problem: Problem, device: Device) -> Operator | None:
        return None


def _work_of_single_training(problem: Problem) -> Work:
    few, layers = problem.batch <= MOST_ROWS, problem.num_layers
    launches = 3 if few else 6  # the library computes two products for each weight matrix
    return Work(
        matmul_flops=3 * problem.matmul_flops,
        # The weights are read twice, and their gradients are written.
        bytes_moved=3 * problem.parameter_count * problem.element_bytes,
        launches=layers * launches,
        operators=layers * (launches + 11),  # most of which allocate memory
    )


def _combinations(problem: Problem) -> int:
    """Return the number of times in a step that units are combined."""
    return combinations_of(step_cell(problem.cell)).places


stepwise = _Stepwise()

"""The algorithms for calls of a single time step: one launch for each layer, and in training a backward pass for it."""

from __future__ import annotations

from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec, Work
from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.kernels import stack
from gatewise.kernels.stepwise.products import state_dtype
from gatewise.kernels.stepwise.single_criteria import MOST_ROWS
from gatewise.kernels.sums import has_scattered_sums


class _SingleCall:
    """The algorithm for calls without gradients (`single`)."""

    def description(self, problem: Problem, device: Device) -> str:
        return "one launch for each layer, which computes the products, too"

    def work(self, problem: Problem, device: Device) -> Work:
        return Work(
            matmul_flops=problem.matmul_flops,
            bytes_moved=problem.parameter_count * problem.element_bytes,
            launches=problem.num_layers,
            operators=3,  # which allocate the results
        )

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        return ()

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        return 0

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        # It imports the compiler, which choosing a kernel does not need.
        from gatewise.kernels.stepwise.single import single_call

        return single_call(problem, inputs)

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        raise AssertionError("a call without gradients has no backward pass")


class _SingleTraining:
    """The algorithm for training calls (`single_training`)."""

    def description(self, problem: Problem, device: Device) -> str:
        last = "two backward" if problem.batch <= MOST_ROWS else "one backward beside the library's products"
        return f"one launch forward for each layer, {last}"

    def work(self, problem: Problem, device: Device) -> Work:
        # For more sequences the library computes two products for each weight matrix, beside one launch in each pass.
        launches = 3 if problem.batch <= MOST_ROWS else 6
        return Work(
            matmul_flops=3 * problem.matmul_flops,
            # The weights are read twice, and their gradients are written.
            bytes_moved=3 * problem.parameter_count * problem.element_bytes,
            launches=problem.num_layers * launches,
            operators=problem.num_layers * (launches + 11),  # most of which allocate memory
        )

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        output = TensorSpec((1, problem.batch, problem.hidden_size), problem.dtype)
        sums = (problem.batch, len(problem.cell.sums) * problem.hidden_size)
        own = TensorSpec(sums, state_dtype(problem.dtype))
        return (*[output] * (problem.num_layers - 1), *[own] * problem.num_layers)

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        # The gradients of the sums, of the hidden states, and of what lies between two layers; then the states of all
        # layers, before they are joined.
        states = problem.num_layers * (1 + len(problem.cell.states)) if problem.num_layers > 1 else 0
        values = len(problem.cell.sums) + 4 + states
        if problem.batch > MOST_ROWS and has_scattered_sums(problem.cell):
            values += len(problem.cell.gates)  # the gradients of the recurrent products
        return problem.batch * problem.hidden_size * values * problem.element_bytes

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        from gatewise.kernels.stepwise.single_training import forward

        return stack.forward(problem, inputs, forward)

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        from gatewise.kernels.stepwise.single_training import backward

        return stack.backward(problem, inputs, result, gradients, needs, backward)


single_call, single_training = _SingleCall(), _SingleTraining()

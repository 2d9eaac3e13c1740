"""The algorithm for calls whose sizes are rounded up: that for the rounded sizes, with copies before and after it."""

from __future__ import annotations

import dataclasses

from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec, Work
from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.kernels.stepwise.algorithm import Algorithm
from gatewise.kernels.stepwise.padding import Padding


def padded_call(wide: Problem, inner: Algorithm) -> Algorithm:
    """Return the algorithm that pads the tensors of a call, runs another algorithm, and crops its results.

    Args:
        wide: The call with padding.
        inner: The algorithm that computes it.
    """
    return _PaddedCall(wide, inner)


@dataclasses.dataclass(frozen=True, slots=True)
class _PaddedCall:
    """The algorithm, with the arguments of `padded_call`."""

    wide: Problem
    inner: Algorithm

    def description(self, problem: Problem, device: Device) -> str:
        inner = self.inner.description(self.wide, device)
        return f"{inner}, sizes rounded up to {self.wide.input_size} and {self.wide.hidden_size}"

    def work(self, problem: Problem, device: Device) -> Work:
        return self.inner.work(self.wide, device) + _work_of_copies(problem, self.wide)

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        if not problem.needs_grad:
            return ()
        output = TensorSpec((self.wide.time, self.wide.batch, self.wide.output_size), self.wide.dtype)
        return (output, *self.inner.kept(self.wide, device))

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        wide = self.wide
        tokens, states = wide.time * wide.batch, wide.num_layers * wide.num_directions * wide.batch * wide.hidden_size
        outputs = tokens * wide.output_size * (2 if problem.needs_grad else 1)
        weights = wide.parameter_count * (2 if problem.needs_grad else 1)
        copies = (tokens * wide.input_size + outputs + weights + 4 * states) * wide.element_bytes
        return self.inner.workspace_bytes(wide, device) + copies

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        between = Padding(problem, self.wide)
        return between.result(self.inner.forward(self.wide, between.inputs(inputs)))

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        between = Padding(problem, self.wide)
        inputs, gradients = between.inputs(inputs), between.above(gradients)
        return between.gradients(self.inner.backward(self.wide, inputs, between.kept(result, inputs), gradients, needs))


def _work_of_copies(problem: Problem, wide: Problem) -> Work:
    """Return the work of padding and cropping all tensors of a call."""
    passes = 2 if problem.needs_grad else 1
    directions = problem.num_directions
    weights = problem.num_layers * directions * (2 + 2 * problem.bias)
    gaps = problem.num_layers - 1 if problem.dropout else 0
    tokens = problem.time * problem.batch
    # Tensors are filled with zeros and written, weights in two parts, and cropped tensors are read and written.
    rows = tokens * (3 * wide.input_size + 2 * wide.output_size) * passes
    return Work(
        bytes_moved=(rows + 3 * passes * wide.parameter_count) * problem.element_bytes,
        launches=(3 * weights + 2 * (3 + gaps) + 3) * passes + (weights + 3 if problem.needs_grad else 0),
        operators=(4 * (weights + 3 + gaps) + 6) * passes + (2 * (weights + 3) if problem.needs_grad else 0),
    )

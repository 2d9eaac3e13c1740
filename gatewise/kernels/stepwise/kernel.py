"""The kernel `stepwise`: in each time step, one matrix product of cuBLAS and one element-wise CUDA kernel."""

from __future__ import annotations

from collections.abc import Sequence

from gatewise.contract.criterion import Criterion
from gatewise.contract.device import Device
from gatewise.contract.kernel import Operator, TensorSpec, Traces, Work
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.kernels.stepwise.chosen_algorithm import algorithm_of
from gatewise.kernels.stepwise.criteria import CRITERIA


class _Stepwise:
    """The kernel: recurrent products of cuBLAS, and one element-wise CUDA kernel between two of them.

    The weights are read from memory at every step, so that there is no limit on their size. Calls of a single step of a
    few sequences have algorithms of their own (`chosen_algorithm`).
    """

    name = "stepwise"
    summary = "one library product and one element-wise launch per step"
    layouts = frozenset({Layout.DENSE, Layout.HOST_LENGTHS, Layout.DEVICE_LENGTHS})
    widens_gradients = True
    # Entry points in cuda/*.cu.
    traces = Traces(frozenset({"step_forward", "single_call"}), frozenset({"step_backward", "single_adjoint"}))

    def sets_up_in_captures(self, problem: Problem) -> bool:
        return True

    def single_use(self, problem: Problem) -> bool:
        # The gradients of the gates overwrite the kept gates; only what single training calls keep could be read twice.
        return True

    def factor_widths(self, problem: Problem) -> tuple[int, ...]:
        return ()

    def criteria(self) -> Sequence[Criterion]:
        return CRITERIA

    def algorithm(self, problem: Problem, device: Device) -> str:
        return algorithm_of(problem, device).description(problem, device)

    def work(self, problem: Problem, device: Device) -> Work:
        return algorithm_of(problem, device).work(problem, device)

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        return algorithm_of(problem, device).kept(problem, device)

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        return algorithm_of(problem, device).workspace_bytes(problem, device)

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        return algorithm_of(problem, Device.probe(inputs.x.device)).forward(problem, inputs)

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        algorithm = algorithm_of(problem, Device.probe(inputs.x.device))
        return algorithm.backward(problem, inputs, result, gradients, needs)

    def recorded(self, problem: Problem, inputs: Inputs) -> Result | None:
        return None

    def operator(self, problem: Problem, device: Device) -> Operator | None:
        return None

    def in_graph(self, problem: Problem, device: Device) -> Operator | None:
        return None


stepwise = _Stepwise()

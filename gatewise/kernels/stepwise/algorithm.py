"""The interface of the algorithms of the kernel `stepwise`."""

from __future__ import annotations

from typing import Protocol

from gatewise.contract.device import Device
from gatewise.contract.kernel import TensorSpec, Work
from gatewise.contract.problem import Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result


class Algorithm(Protocol):
    """An algorithm for calls that the kernel accepts: what it costs, what it keeps, and both passes."""

    def description(self, problem: Problem, device: Device) -> str:
        """Return a few words on the algorithm, as a decision shows them."""
        ...

    def work(self, problem: Problem, device: Device) -> Work:
        """Return the work of a call."""
        ...

    def kept(self, problem: Problem, device: Device) -> tuple[TensorSpec, ...]:
        """Return the tensors that a forward pass keeps for the backward pass."""
        ...

    def workspace_bytes(self, problem: Problem, device: Device) -> int:
        """Return the memory that a call takes beside its inputs, results and what it keeps."""
        ...

    def forward(self, problem: Problem, inputs: Inputs) -> Result:
        """Run the forward pass."""
        ...

    def backward(
        self, problem: Problem, inputs: Inputs, result: Result, gradients: OutputGradients, needs: Needs
    ) -> InputGradients:
        """Run the backward pass."""
        ...

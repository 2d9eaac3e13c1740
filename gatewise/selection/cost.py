"""Prediction of times from stated work: only this file and those it calls depend on the speed of devices.

An estimate is the roofline of the device with launches and exchanges. Where calls were measured on the device, the
estimate is multiplied by the ratio of measured to estimated times of similar calls, a smooth function of sizes
(`correction`).
"""

from __future__ import annotations

from gatewise.contract.device import Device
from gatewise.contract.kernel import Kernel, Work
from gatewise.contract.problem import Problem
from gatewise.selection import correction, estimate


def seconds(kernel: str, work: Work, problem: Problem, device: Device) -> float:
    """Predict the time of a call.

    The CPU issues operators and launches while the device works through launches, exchanges, arithmetic and memory
    traffic; the larger of the two times counts. In a CUDA graph, only the device's time counts. On a CPU device,
    nothing overlaps and the times add up.

    Args:
        kernel: The name of the kernel.
        work: The work that the kernel states.
        problem: The problem; its dtype, and whether it allows TF32 and is captured in a CUDA graph, are read.
        device: The device, with its speeds.
    """
    factors = correction.factors(kernel, work, problem, device)
    busy = estimate.estimated(work, problem, device) * factors.busy
    if problem.captured or device.kind == "cpu":
        return busy
    return max(estimate.issue(work, device) * factors.issue, busy)


def is_measured(kernel: str, problem: Problem, device: Device) -> bool:
    """Return whether a prediction rests on calls like it that were measured on the device: same kernel, dtype, pass."""
    return correction.is_measured(kernel, problem, device)


def peak_bytes(kernel: Kernel, problem: Problem, device: Device) -> int:
    """Predict the peak memory of a call in addition to its inputs and weights.

    It consists of outputs, kept tensors and workspace; in training, also of the gradients of input and weights.
    """
    states = problem.num_layers * problem.num_directions * problem.batch * (problem.state_size + problem.hidden_size)
    outputs = problem.time * problem.batch * problem.output_size + states
    gradients = 0
    if problem.needs_grad:
        gradients = problem.parameter_count + problem.time * problem.batch * problem.x_size + states
    kept = sum(spec.nbytes for spec in kernel.kept(problem, device))
    return (outputs + gradients) * problem.element_bytes + kept + kernel.workspace_bytes(problem, device)

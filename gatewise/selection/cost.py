"""Seconds from stated work: the only place that knows how fast devices are.

An estimate is the roofline of the device with launches and exchanges. Where calls were measured on the device, it is
multiplied by how far the estimates of the measured calls missed, as a smooth function of sizes (`correction`).
"""

from __future__ import annotations

from gatewise.contract.device import Device
from gatewise.contract.kernel import Kernel, Work
from gatewise.contract.problem import Problem
from gatewise.selection import correction


def seconds(kernel: str, work: Work, problem: Problem, device: Device) -> float:
    """Predict the time of a call.

    The CPU issues operators and launches while the device works through launches, exchanges, arithmetic and memory
    traffic; the slower of the two decides. In a CUDA graph the device's time is all there is. On a CPU device there is
    no overlap: the times add up.

    Args:
        kernel: The kernel's name.
        work: What the kernel states.
        problem: Gives the dtype, whether TF32 is allowed, and whether the call is in a CUDA graph.
        device: Gives the speeds.
    """
    factors = correction.factors(kernel, work, problem, device)
    busy = correction.estimated(work, problem, device) * factors.busy
    if problem.captured or device.kind == "cpu":
        return busy
    return max(correction.issue(work, device) * factors.issue, busy)


def is_measured(kernel: str, problem: Problem, device: Device) -> bool:
    """Return whether a prediction rests on calls like it that were measured on the device: same kernel, dtype, pass."""
    return correction.is_measured(kernel, problem, device)


def peak_bytes(kernel: Kernel, work: Work, problem: Problem, device: Device) -> int:
    """Predict the peak memory of a call beyond its inputs and weights.

    The outputs, what is kept for backward and the workspace; in training also the gradients of input and weights.
    """
    states = problem.num_layers * problem.num_directions * problem.batch * (problem.state_size + problem.hidden_size)
    outputs = problem.time * problem.batch * problem.output_size + states
    gradients = 0
    if problem.needs_grad:
        gradients = problem.parameter_count + problem.time * problem.batch * problem.x_size + states
    kept = sum(spec.nbytes for spec in kernel.kept(problem, device))
    return (outputs + gradients) * problem.element_bytes + kept + work.workspace_bytes

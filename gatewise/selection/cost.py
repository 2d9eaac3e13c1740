"""Seconds from stated work: the only place that knows how fast devices are."""

from __future__ import annotations

from gatewise.contract.device import Device
from gatewise.contract.kernel import Kernel, Work
from gatewise.contract.problem import Problem


def seconds(work: Work, problem: Problem, device: Device) -> float:
    """Predict the time of a call.

    The CPU issues operators and launches while the device works through launches, exchanges, arithmetic and memory
    traffic; the slower of the two decides. In a CUDA graph the device's time is all there is. On a CPU device there is
    no overlap: the times add up.

    Args:
        work: What the kernel states.
        problem: Gives the dtype, whether TF32 is allowed, and whether the call is in a CUDA graph.
        device: Gives the speeds.
    """
    issue = work.operators * device.operator_seconds + work.launches * device.issue_seconds
    arithmetic = work.matmul_flops / device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32)
    traffic = work.bytes_moved / device.memory_bandwidth
    busy = work.launches * device.launch_seconds + work.exchanges * device.exchange_seconds + max(arithmetic, traffic)
    if device.kind == "cpu":
        return issue + busy
    return busy if problem.captured else max(issue, busy)


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

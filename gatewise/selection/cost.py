"""Prediction of times from stated work: only this file depends on the speed of devices."""

from __future__ import annotations

from gatewise.contract.device import Device
from gatewise.contract.kernel import Kernel, Work
from gatewise.contract.problem import Problem


def seconds(work: Work, problem: Problem, device: Device) -> float:
    """Predict the time of a call.

    The CPU issues operators and launches while the device works through launches, exchanges, arithmetic and memory
    traffic; the larger of the two times counts. In a CUDA graph, only the device's time counts. On a CPU device,
    nothing overlaps and the times add up.

    Args:
        work: The work that the kernel states.
        problem: The problem; its dtype, and whether it allows TF32 and is captured in a CUDA graph, are read.
        device: The device, with its speeds.
    """
    issue = work.operators * device.operator_seconds + work.launches * device.issue_seconds
    arithmetic = work.matmul_flops / device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32)
    traffic = work.bytes_moved / device.memory_bandwidth
    busy = work.launches * device.launch_seconds + work.exchanges * device.exchange_seconds + max(arithmetic, traffic)
    if device.kind == "cpu":
        return issue + busy
    return busy if problem.captured else max(issue, busy)


def peak_bytes(kernel: Kernel, work: Work, problem: Problem, device: Device) -> int:
    """Predict the peak memory of a call in addition to its inputs and weights.

    It consists of outputs, kept tensors and workspace; in training, also of the gradients of input and weights.
    """
    states = problem.num_layers * problem.num_directions * problem.batch * (problem.state_size + problem.hidden_size)
    outputs = problem.time * problem.batch * problem.output_size + states
    gradients = 0
    if problem.needs_grad:
        gradients = problem.parameter_count + problem.time * problem.batch * problem.x_size + states
    kept = sum(spec.nbytes for spec in kernel.kept(problem, device))
    return (outputs + gradients) * problem.element_bytes + kept + work.workspace_bytes

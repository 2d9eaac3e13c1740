"""Which algorithm of the kernel `stepwise` computes a call."""

from __future__ import annotations

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.stepwise.algorithm import Algorithm
from gatewise.kernels.stepwise.padded_call import padded_call
from gatewise.kernels.stepwise.padding import padded
from gatewise.kernels.stepwise.single_algorithms import single_call, single_training
from gatewise.kernels.stepwise.single_criteria import is_single_call, is_single_training
from gatewise.kernels.stepwise.step_loop import step_loop


def algorithm_of(problem: Problem, device: Device) -> Algorithm:
    """Return the algorithm that computes a call.

    Args:
        problem: A call that the kernel accepts.
        device: The properties of its device.
    """
    if is_single_call(problem, device):
        return single_call
    if is_single_training(problem, device):
        return single_training
    wide = padded(problem, device)
    return step_loop if wide is None else padded_call(wide, algorithm_of(wide, device))

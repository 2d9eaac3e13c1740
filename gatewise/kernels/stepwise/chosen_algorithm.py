"""Which algorithm of the kernel `stepwise` computes a call."""

from __future__ import annotations

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.stepwise.algorithm import Algorithm
from gatewise.kernels.stepwise.one_step import one_step, one_training_step
from gatewise.kernels.stepwise.padding import padded
from gatewise.kernels.stepwise.rounded_sizes import rounded_sizes
from gatewise.kernels.stepwise.single_criteria import is_single_call, is_single_training
from gatewise.kernels.stepwise.step_loop import step_loop


def algorithm_of(problem: Problem, device: Device) -> Algorithm:
    """Return the algorithm that computes a call.

    Args:
        problem: A call that the kernel accepts.
        device: The properties of its device.
    """
    if is_single_call(problem, device):
        return one_step
    if is_single_training(problem, device):
        return one_training_step
    wide = padded(problem, device)
    return step_loop if wide is None else rounded_sizes(wide, algorithm_of(wide, device))

"""How far the predicted ratio of two kernels' times is from the measured one, on a CPU."""

from __future__ import annotations

import functools
import math

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.selection import correction


def margin(kernel: str, other: str, problem: Problem, device: Device) -> float:
    """Return the standard error of the logarithm of the predicted ratio of two kernels' times on a CPU.

    It is the root of the mean square over the measured calls, each of which is predicted from all others. It contains
    the noise of the measurements, and what other calls do not say about a call.

    Args:
        kernel: The name of a kernel.
        other: The name of another kernel.
        problem: The call, whose cell and pass are read.
        device: The CPU.

    Returns:
        The error; 0 if such calls of neither kernel were measured, so that both times are estimates, and infinity if
        those of only one were, because its time and the estimate of the other are not comparable.
    """
    fits = [correction.fit_for(name, problem, device) for name in (kernel, other)]
    if None in fits:
        return 0.0 if fits == [None, None] else math.inf
    return _standard_error(kernel, other, problem.needs_grad, device.name, problem.cell)


@functools.lru_cache(maxsize=64)
def _standard_error(kernel: str, other: str, training: bool, device: str, cell: Cell) -> float:
    one, two = (_errors(name, training, device, cell) for name in (kernel, other))
    squares = [(one[call] - two[call]) ** 2 for call in one.keys() & two.keys()]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.inf


def _errors(kernel: str, training: bool, device: str, cell: Cell) -> dict[Problem, float]:
    """Return the errors of the predicted logarithms of measured calls, each predicted from all others."""
    found = correction.fit(kernel, training, device, cell=cell)
    if found is None:
        return {}
    calls = correction.measured_calls(kernel, training, device, cell)
    return {call.problem: float(error) for call, error in zip(calls, found.busy.errors(), strict=True)}

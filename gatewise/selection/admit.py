"""The verdicts of kernels on a problem: refusals, or work, predicted time and predicted memory."""

from __future__ import annotations

import functools

from gatewise.contract.decision import Verdict
from gatewise.contract.device import Device
from gatewise.contract.kernel import Kernel
from gatewise.contract.problem import Problem
from gatewise.kernels import ALL
from gatewise.selection import cost

_BY_NAME = {kernel.name: kernel for kernel in ALL}


def verdict(kernel: Kernel, problem: Problem, device: Device) -> Verdict:
    """Return the verdict of one kernel on a problem."""
    checks = (criterion.check(problem, device) for criterion in kernel.criteria())
    refusals = tuple(refusal for refusal in checks if refusal is not None)
    if refusals:
        return Verdict(kernel.name, kernel.summary, refusals=refusals)
    work = kernel.work(problem, device)
    return Verdict(
        kernel.name,
        kernel.summary,
        algorithm=kernel.algorithm(problem, device),
        work=work,
        seconds=cost.seconds(kernel.name, work, problem, device),
        known=cost.is_measured(kernel.name, problem, device),
        memory=functools.partial(cost.peak_bytes, kernel, problem, device),
    )


def verdicts(problem: Problem, device: Device) -> tuple[Verdict, ...]:
    """Return the verdicts of all kernels on a problem."""
    return tuple(verdict(kernel, problem, device) for kernel in ALL)


def kernel_names() -> tuple[str, ...]:
    """Return the names of all kernels, in the order of their verdicts."""
    return tuple(kernel.name for kernel in ALL)


def kernel_named(name: str) -> Kernel:
    """Return a kernel by its name, which must exist."""
    return _BY_NAME[name]

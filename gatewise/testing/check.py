"""One kernel, one problem: run it, and hold every output and gradient to its budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from gatewise.contract.criterion import Refusal
from gatewise.contract.device import Device
from gatewise.contract.errors import ArgumentError
from gatewise.contract.kernel import Kernel
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.saved import InputGradients, Inputs, Needs, OutputGradients, Result
from gatewise.functional.ragged import conversion
from gatewise.testing.budgets import budgets, named, relative_error
from gatewise.testing.cases import make_gradients, make_inputs
from gatewise.testing.oracle import oracle


class Disagreement(AssertionError):
    """A kernel's tensor is further from the oracle than its budget, or has another shape or dtype."""


class Measured(NamedTuple):
    """What was found about one tensor: its relative error against the oracle, and the budget."""

    error: float
    budget: float


def check_kernel(
    kernel: Kernel,
    problem: Problem,
    device: torch.device | str = "cpu",
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
) -> dict[str, Measured]:
    """Compare a kernel's outputs, final states and every gradient with the float64 oracle.

    Args:
        kernel: To check; it must accept the problem on this device.
        problem: What to compute; with `needs_grad` the backward pass is checked too.
        device: Where.
        lengths: Of the rows, for every layout but dense; default `testing.lengths_of(problem)`.
        seed: Of the random inputs.

    Returns:
        Error and budget of every tensor, by name.

    Raises:
        ArgumentError: The kernel refuses the problem.
        Disagreement: A tensor is beyond its budget; the message has each one's name, error and budget.
    """
    refusals = why_not(kernel, problem, device)
    if refusals:
        raise ArgumentError(f"{kernel.name} refuses {problem}: {'; '.join(refusals)}")
    inputs = make_inputs(problem, device, lengths=lengths, seed=seed)
    gradients = make_gradients(problem, inputs, seed=seed + 1) if problem.needs_grad else None
    exact = named(problem, *oracle(problem, inputs, gradients))
    with _rounding_of(problem):
        found = named(problem, *run_kernel(kernel, problem, inputs, gradients))
        allowed = budgets(problem, inputs, gradients, exact, device)
    measured, complaints = {}, []
    for name, value in exact.items():
        if name not in found:
            complaints.append(f"{name}: missing")
            continue
        measured[name] = Measured(relative_error(found[name], value), allowed[name])
        if found[name].shape != value.shape or found[name].dtype != problem.dtype:
            got = f"{list(found[name].shape)} {found[name].dtype}"
            complaints.append(f"{name}: {got}, expected {list(value.shape)} {problem.dtype}")
        elif not measured[name].error <= measured[name].budget:
            complaints.append(f"{name}: relative error {measured[name].error:.3g}, budget {measured[name].budget:.3g}")
    if complaints:
        raise Disagreement(f"{kernel.name} on {problem} ({device}):\n  " + "\n  ".join(complaints))
    return measured


def _rounding_of(problem: Problem) -> AbstractContextManager:
    # TF32 only for a problem that allows it: PyTorch's default would widen the budgets of all others a thousandfold.
    library = torch.backends.cudnn
    return library.flags(
        enabled=library.enabled,
        benchmark=library.benchmark,
        deterministic=library.deterministic,
        allow_tf32=problem.allow_tf32,
    )


def run_kernel(
    kernel: Kernel,
    problem: Problem,
    inputs: Inputs,
    gradients: OutputGradients | None = None,
    needs: Needs = Needs(),  # noqa: B008  an immutable tuple
) -> tuple[Result, InputGradients | None]:
    """Run a kernel's forward pass, and its backward pass if gradients are given, in a layout that it reads.

    Args:
        kernel: To run.
        problem: What to compute, in the caller's layout.
        inputs: In the caller's layout.
        gradients: Of the outputs; None runs the forward pass alone.
        needs: Which gradients to compute.

    Returns:
        Outputs and input gradients in the caller's layout; `kept` as the kernel made it.
    """
    with torch.no_grad():
        between = conversion(problem, inputs, kernel.layouts)
        if between is None:
            result = kernel.forward(problem, inputs)
            found = None if gradients is None else kernel.backward(problem, inputs, result, gradients, needs)
            return result, found
        inner, there = between.problem(problem), between.inputs(inputs)
        own = kernel.forward(inner, there)
        result = between.result_out(own, inputs)
        if gradients is None:
            return result, None
        found = kernel.backward(inner, there, between.result_in(result), between.gradients_in(gradients), needs)
        return result, between.gradients_out(found, gradients)


def why_not(kernel: Kernel, problem: Problem, device: torch.device | str) -> list[str]:
    """Return why a kernel cannot run a problem, one sentence each; empty when it can.

    Args:
        kernel: One of `gatewise.kernels.ALL`, or of your own.
        problem: What would be computed.
        device: Of this machine.
    """
    numbers = Device.probe(device)
    refusals: list[Refusal] = [
        refusal for criterion in kernel.criteria() if (refusal := criterion.check(problem, numbers)) is not None
    ]
    if problem.layout is Layout.DEVICE_LENGTHS and problem.layout not in kernel.layouts and not refusals:
        return ["layout is lengths on the GPU, which it does not read"]
    return [str(refusal) for refusal in refusals]

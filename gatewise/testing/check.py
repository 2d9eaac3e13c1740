"""The check of a kernel on a problem, which compares every output and gradient with its budget."""

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
from gatewise.functional.packing import conversion
from gatewise.kernels.cuda.precision import products_in_tf32
from gatewise.testing.budgets import budgets, named, relative_error
from gatewise.testing.cases import make_gradients, make_inputs
from gatewise.testing.oracle import oracle

_OTHER_THAN_WEIGHTS = {"y", "h_n", "c_n", "dx", "dh0", "dc0"}


class Disagreement(AssertionError):
    """A tensor's distance from the oracle exceeds its budget, or the tensor has a wrong shape or dtype."""


class Measured(NamedTuple):
    """The relative error of a tensor with respect to the oracle, and its budget."""

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
        kernel: The kernel to check; it must accept the problem on this device.
        problem: The problem; with `needs_grad` the backward pass is checked too.
        device: The device on which the kernel runs.
        lengths: The lengths of the sequences, for every layout except dense; default `testing.lengths_of(problem)`.
        seed: The seed of the random inputs.

    Returns:
        The error and the budget of every tensor, by name.

    Raises:
        ArgumentError: The kernel refuses the problem.
        Disagreement: A tensor exceeds its budget; the message has the name, error and budget of each such tensor.
    """
    refusals = why_not(kernel, problem, device)
    if refusals:
        raise ArgumentError(f"{kernel.name} refuses {problem}: {'; '.join(refusals)}")
    inputs = make_inputs(problem, device, lengths=lengths, seed=seed)
    gradients = make_gradients(problem, inputs, seed=seed + 1) if problem.needs_grad else None
    exact = named(problem, *oracle(problem, inputs, gradients))
    with _rounding_of(problem), products_in_tf32(problem):
        found = named(problem, *run_kernel(kernel, problem, inputs, gradients))
        allowed = budgets(problem, inputs, gradients, exact, device)
    measured, complaints = {}, []
    for name, value in exact.items():
        if name not in found:
            complaints.append(f"{name}: missing")
            continue
        measured[name] = Measured(relative_error(found[name], value), allowed[name])
        dtypes = {problem.dtype}
        if problem.float32_gradients and name not in _OTHER_THAN_WEIGHTS:
            dtypes.add(torch.float32)
        if found[name].shape != value.shape or found[name].dtype not in dtypes:
            got = f"{list(found[name].shape)} {found[name].dtype}"
            complaints.append(f"{name}: {got}, expected {list(value.shape)} {problem.dtype}")
        elif not measured[name].error <= measured[name].budget:
            complaints.append(f"{name}: relative error {measured[name].error:.3g}, budget {measured[name].budget:.3g}")
    if complaints:
        raise Disagreement(f"{kernel.name} on {problem} ({device}):\n  " + "\n  ".join(complaints))
    return measured


def _rounding_of(problem: Problem) -> AbstractContextManager:
    # TF32 is enabled only if the problem allows it: PyTorch's default would widen all other budgets a thousandfold.
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
    """Run a kernel's forward pass, and its backward pass if gradients are given, in a layout that the kernel supports.

    Args:
        kernel: The kernel to run.
        problem: The problem, in the caller's layout.
        inputs: The inputs, in the caller's layout.
        gradients: The gradients of the outputs; None runs the forward pass alone.
        needs: The gradients to compute.

    Returns:
        The outputs and the input gradients in the caller's layout, and `kept` as the kernel returned it.
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
    """Return the reasons why a kernel cannot run a problem, one sentence each; empty if it can.

    Args:
        kernel: One of `gatewise.kernels.ALL`, or a kernel of your own.
        problem: The problem.
        device: A device of this machine.
    """
    numbers = Device.probe(device)
    refusals: list[Refusal] = [
        refusal for criterion in kernel.criteria() if (refusal := criterion.check(problem, numbers)) is not None
    ]
    if problem.layout is Layout.DEVICE_LENGTHS and problem.layout not in kernel.layouts and not refusals:
        return ["layout is lengths on the GPU, which it does not read"]
    return [str(refusal) for refusal in refusals]

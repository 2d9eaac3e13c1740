"""The choice of an attention kernel for a problem, and the prediction of its time and memory."""

from __future__ import annotations

import functools

from gatewise.attention.fused import fused
from gatewise.attention.kernel import Kernel, Work
from gatewise.attention.problem import Problem
from gatewise.attention.recompute import recompute
from gatewise.attention.reference import reference
from gatewise.contract.budget import check_memory_budget
from gatewise.contract.decision import Decision, Verdict, format_bytes
from gatewise.contract.device import Device
from gatewise.contract.errors import KernelRefused, OutOfMemoryPredicted, sentence

AUTO = "auto"
ALL: tuple[Kernel, ...] = (fused, recompute, reference)
_BY_NAME = {kernel.name: kernel for kernel in ALL}

# The special function units compute 16 results per clock and multiprocessor, at about 1.7 GHz. A CPU core computes a
# hyperbolic tangent in about two nanoseconds.
_TANHS_CUDA, _TANHS_CPU = 16 * 1.7e9, 5e8


def kernel_names() -> tuple[str, ...]:
    """Return the names of all attention kernels, in the order in which they are considered."""
    return tuple(_BY_NAME)


def kernel_named(name: str, argument: str = "kernel") -> Kernel:
    """Return a kernel by its name.

    Args:
        name: The name.
        argument: The argument that has the name, for the error.

    Raises:
        KernelRefused: No kernel has that name.
    """
    if not isinstance(name, str) or name not in _BY_NAME:
        known = ", ".join(map(repr, (AUTO, *_BY_NAME)))
        raise KernelRefused(sentence(argument, f"one of {known}", repr(name)))
    return _BY_NAME[name]


def seconds(work: Work, problem: Problem, device: Device) -> float:
    """Predict the time of a call as for LSTM kernels, with the special function units as one more possible limit."""
    issue = work.operators * device.operator_seconds + work.launches * device.issue_seconds
    arithmetic = work.matmul_flops / device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32)
    traffic = work.bytes_moved / device.memory_bandwidth
    rate = device.multiprocessors * (_TANHS_CPU if device.kind == "cpu" else _TANHS_CUDA)
    busy = work.launches * device.launch_seconds + max(arithmetic + traffic, work.tanhs / rate)
    return issue + busy if device.kind == "cpu" else max(issue, busy)


def peak_bytes(kernel: Kernel, work: Work, problem: Problem, device: Device) -> int:
    """Predict the peak memory of a call beyond its inputs: context, gradients, kept tensors and workspace."""
    outputs = problem.steps * problem.batch * problem.value_size
    if problem.needs_grad:
        outputs += problem.steps * problem.batch * problem.hidden_size
        outputs += problem.source * problem.batch * (problem.hidden_size + problem.value_size)
    kept = sum(spec.nbytes for spec in kernel.kept(problem, device))
    return outputs * problem.dtype.itemsize + kept + work.workspace_bytes


@functools.lru_cache(maxsize=4096)
def decide(problem: Problem, device: Device, kernel: str = AUTO, memory_budget: float | None = None) -> Decision:
    """Return the verdict of every kernel and the kernel that runs; a kernel that cannot run raises no error here.

    Args:
        problem: The description of the call.
        device: The device of the call.
        kernel: The name of a kernel, or "auto" for the least predicted time.
        memory_budget: The maximum predicted memory in bytes for "auto"; None for no limit. It does not apply to a
            kernel that is named.
    """
    verdicts = tuple(_verdict(each, problem, device) for each in ALL)
    if kernel != AUTO:
        accepted = next(verdict.accepted for verdict in verdicts if verdict.kernel == kernel_named(kernel).name)
        reason = "named by the argument `kernel`" if accepted else f"{kernel!r} was named and refuses"
        return Decision(problem, device, verdicts, kernel if accepted else None, reason)  # type: ignore[arg-type]
    able = sorted((verdict for verdict in verdicts if verdict.accepted), key=lambda verdict: verdict.seconds or 0.0)
    fitting = [verdict for verdict in able if memory_budget is None or (verdict.peak_bytes or 0) <= memory_budget]
    if able[0] in fitting:
        reason = "least predicted time" if len(able) > 1 else "the only kernel that accepts"
        return Decision(problem, device, verdicts, able[0].kernel, reason)  # type: ignore[arg-type]
    reason = (
        f"{able[0].kernel} needs {format_bytes(able[0].peak_bytes)}, budget {format_bytes(int(memory_budget or 0))}"
    )
    chosen = fitting[0].kernel if fitting else None
    return Decision(problem, device, verdicts, chosen, reason, able[0].kernel)  # type: ignore[arg-type]


def choose(problem: Problem, device: Device, kernel: str = AUTO, memory_budget: float | None = None) -> Kernel:
    """Return the kernel that runs, or raise if the named kernel, or every kernel within the budget, cannot run.

    Raises:
        KernelRefused: The named kernel cannot run this call; the message is the decision.
        OutOfMemoryPredicted: No kernel fits into the memory budget; the message is the decision.
    """
    check_memory_budget(memory_budget)
    decision = decide(problem, device, kernel, memory_budget)
    if decision.chosen is not None:
        return _BY_NAME[decision.chosen]
    if kernel == AUTO:
        raise OutOfMemoryPredicted(f"no attention kernel fits into the memory budget\n\n{decision}")
    raise KernelRefused(f"the attention kernel {kernel!r} cannot run this call\n\n{decision}")


def _verdict(kernel: Kernel, problem: Problem, device: Device) -> Verdict:
    checks = (criterion.check(problem, device) for criterion in kernel.criteria())  # type: ignore[arg-type]
    refusals = tuple(refusal for refusal in checks if refusal is not None)
    if refusals:
        return Verdict(kernel.name, kernel.summary, refusals=refusals)
    work = kernel.work(problem, device)
    return Verdict(
        kernel.name,
        kernel.summary,
        work=work,  # type: ignore[arg-type]
        seconds=seconds(work, problem, device),
        memory=lambda: peak_bytes(kernel, work, problem, device),
    )

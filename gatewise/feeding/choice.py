"""The choice of a decoder kernel for a problem, and the prediction of its time and memory."""

from __future__ import annotations

import dataclasses
import functools

from gatewise import attention
from gatewise.attention.choice import choose as choose_attention
from gatewise.attention.choice import kernel_named as attention_kernel_named
from gatewise.attention.choice import seconds as attention_seconds
from gatewise.contract.decision import Decision, Verdict
from gatewise.contract.device import Device
from gatewise.contract.errors import KernelRefused, sentence
from gatewise.contract.kernel import TensorSpec, Work
from gatewise.feeding import memory
from gatewise.feeding.kernel import Kernel, eager, fused
from gatewise.feeding.problem import Problem
from gatewise.selection.preference import preference

AUTO = "auto"
ALL: tuple[Kernel, ...] = (fused, eager)
_BY_NAME = {kernel.name: kernel for kernel in ALL}


def kernel_names() -> tuple[str, ...]:
    """Return the names of all decoder kernels, in the order in which they are considered."""
    return tuple(_BY_NAME)


def decide(problem: Problem, device: Device, kernel: str = AUTO) -> Decision:
    """Return the verdict of every kernel and the kernel that runs; a kernel that cannot run raises no error here.

    Args:
        problem: The description of the call.
        device: The device of the call.
        kernel: The name of a decoder kernel; or "auto" for the kernel that `gatewise.use_kernel` or GATEWISE_KERNEL
            names, and otherwise the one with the least predicted time.

    Raises:
        KernelRefused: The argument is not the name of a decoder kernel, or no attention kernel has its name.
    """
    if kernel == AUTO:
        wanted = preference()
        return _decide(problem, device, wanted.kernel, wanted.source)
    if not isinstance(kernel, str) or kernel not in _BY_NAME:
        known = ", ".join(map(repr, (AUTO, *_BY_NAME)))
        raise KernelRefused(sentence("kernel", f"one of {known}", repr(kernel)))
    return _decide(problem, device, kernel, "named by the argument `kernel`")


def choose(problem: Problem, device: Device, kernel: str = AUTO) -> Kernel:
    """Return the kernel that runs, or raise if the named kernel, or every kernel, cannot run.

    Raises:
        KernelRefused: With the printed decision as its text; the one on attention if a named attention kernel refuses.
    """
    decision = decide(problem, device, kernel)
    if decision.chosen is None:
        choose_attention(problem.attention, device, problem.attention_kernel)
        raise KernelRefused(f"this decoder with input feeding cannot be computed as asked\n\n{decision}")
    return _BY_NAME[decision.chosen]


def kept(problem: Problem, device: Device, kernel: str = AUTO) -> dict[str, tuple[TensorSpec, ...]]:
    """Return the tensors that live from the forward pass to the backward pass, by purpose; see `memory.kept`.

    Raises:
        KernelRefused: The named kernel, or the attention kernel, cannot run this call.
    """
    return memory.kept(problem, device, halves=choose(problem, device, kernel).halves(problem, device))


def seconds(kernel: Kernel, work: Work, problem: Problem, device: Device) -> float:
    """Predict the time of a call: the decoder's own work, and that of the attention of each step.

    Args:
        kernel: The decoder kernel.
        work: The work of that kernel.
        problem: The description of the call.
        device: The device of the call.
    """
    one_step = problem.attention.replace(steps=1)
    name = attention.explain(problem.attention, device, problem.attention_kernel).chosen
    of_attention = attention_kernel_named(name or "").work(one_step, device)
    if kernel.attends_at_once(problem, device):  # in the launch that the decoder counts for the attentional output
        of_attention = dataclasses.replace(of_attention, launches=0, operators=0)
    issue = work.operators * device.operator_seconds + work.launches * device.issue_seconds
    arithmetic = work.matmul_flops / device.matmul_rate(problem.dtype, allow_tf32=problem.allow_tf32)
    busy = work.launches * device.launch_seconds + arithmetic + work.bytes_moved / device.memory_bandwidth
    own = issue + busy if device.kind == "cpu" else max(issue, busy)
    return own + problem.time * attention_seconds(of_attention, one_step, device)


@functools.lru_cache(maxsize=4096)
def _decide(problem: Problem, device: Device, wanted: str, source: str) -> Decision:
    verdicts = tuple(_verdict(kernel, problem, device) for kernel in ALL)
    able = sorted((verdict for verdict in verdicts if verdict.accepted), key=lambda verdict: verdict.seconds or 0.0)
    if wanted != AUTO:
        chosen = next((verdict.kernel for verdict in able if verdict.kernel == wanted), None)
        refuses = "refuses" if wanted in _BY_NAME else "computes no decoder with input feeding"
        reason = source if chosen else f"{wanted!r} was {source} and {refuses}"
    else:
        chosen = able[0].kernel if able else None
        reason = "least predicted time" if len(able) > 1 else "the only kernel that accepts"
        reason = reason if able else "no kernel accepts"
    return Decision(problem, device, verdicts, chosen, reason)  # type: ignore[arg-type]


def _verdict(kernel: Kernel, problem: Problem, device: Device) -> Verdict:
    checks = (criterion.check(problem, device) for criterion in kernel.criteria())  # type: ignore[arg-type]
    refusals = tuple(refusal for refusal in checks if refusal is not None)
    if refusals:
        return Verdict(kernel.name, kernel.summary, refusals=refusals)
    work = kernel.work(problem, device)
    tensors = memory.kept(problem, device, halves=kernel.halves(problem, device)) if problem.needs_grad else {}
    held = sum(spec.nbytes for specs in tensors.values() for spec in specs)
    outputs = problem.time * problem.batch * problem.units * problem.dtype.itemsize
    return Verdict(
        kernel.name,
        kernel.summary,
        work=work,
        seconds=seconds(kernel, work, problem, device),
        memory=lambda: outputs + held + memory.workspace_bytes(problem),
    )

"""The decision for a problem and a preference."""

from __future__ import annotations

import dataclasses
import functools
import logging

from gatewise.contract.budget import check_memory_budget
from gatewise.contract.decision import Decision, format_bytes
from gatewise.contract.device import Device
from gatewise.contract.errors import KernelRefused, OutOfMemoryPredicted
from gatewise.contract.problem import Problem
from gatewise.selection import admit
from gatewise.selection.predict import predicted
from gatewise.selection.preference import AUTO, Preference, preference

_log = logging.getLogger(__name__)


def decide(
    problem: Problem, device: Device, kernel: str | Preference = AUTO, memory_budget: float | None = None
) -> Decision:
    """Return the decision for a problem and the user's preference, without raising if a kernel refuses.

    Args:
        problem: The description of the call.
        device: The device of the call.
        kernel: The argument of the call: a name, or "auto"; or the preference that was read for it.
        memory_budget: The largest predicted memory of the call in bytes; None for no limit. It is ignored if a kernel
            is named.
    """
    wanted = preference(kernel)
    if wanted.kernel != AUTO:
        return _named(problem, device, wanted.kernel, wanted.source)
    if wanted.policy == "measure":
        from gatewise.selection.autotune import measured

        decision = measured(problem, device)
    else:
        decision = predicted(problem, device)
    return decision if memory_budget is None else within(decision, memory_budget)


def decide_by_prediction(problem: Problem, device: Device, kernel: str | Preference = AUTO) -> Decision:
    """Return the decision of the policy "predict" regardless of the policy in use, for devices that this machine lacks.

    Args:
        problem: The description of the call.
        device: The device of the call.
        kernel: The argument of the call: a name, or "auto".
    """
    return decide(problem, device, kernel) if preference(kernel).kernel != AUTO else predicted(problem, device)


def choose(
    problem: Problem, device: Device, kernel: str | Preference = AUTO, memory_budget: float | None = None
) -> Decision:
    """Return the decision for a problem; raise if the named kernel refuses it or no kernel fits into the budget.

    If the budget excludes the fastest kernel, the log has one line with its name and its memory.

    Raises:
        KernelRefused: The named kernel refuses; the message is the printed decision.
        OutOfMemoryPredicted: No kernel fits into the budget; the message is the printed decision.
        ArgumentError: The budget is not a positive number.
    """
    check_memory_budget(memory_budget)
    decision = decide(problem, device, kernel, memory_budget)
    if decision.chosen is None:
        name = preference(kernel).kernel
        if name == AUTO:
            raise OutOfMemoryPredicted(f"no kernel fits into the memory budget\n\n{decision}")
        raise KernelRefused(f"the kernel {name!r} cannot run this call\n\n{decision}")
    if memory_budget is not None and decision.passed_over:
        _log.info("%s runs: %s", decision.chosen, decision.reason)
    return decision


def within(decision: Decision, memory_budget: float) -> Decision:
    """Return the decision among the kernels whose predicted memory is within a budget.

    Args:
        decision: The decision without a budget.
        memory_budget: The budget in bytes.
    """
    accepted = sorted(
        (verdict for verdict in decision.verdicts if verdict.accepted), key=lambda verdict: verdict.seconds or 0.0
    )
    fitting = [verdict for verdict in accepted if (verdict.peak_bytes or 0) <= memory_budget]
    preferred = decision.verdict(decision.chosen or "")
    if preferred in fitting:
        return decision
    reason = f"{preferred.kernel} needs {format_bytes(preferred.peak_bytes)}, budget {format_bytes(int(memory_budget))}"
    return dataclasses.replace(
        decision, chosen=fitting[0].kernel if fitting else None, reason=reason, passed_over=preferred.kernel
    )


@functools.lru_cache(maxsize=4096)
def _named(problem: Problem, device: Device, name: str, source: str) -> Decision:
    verdicts = admit.verdicts(problem, device)
    accepted = next(verdict.accepted for verdict in verdicts if verdict.kernel == name)
    reason = source if accepted else f"{name!r} was {source} and refuses"
    return Decision(problem, device, verdicts, name if accepted else None, reason)

"""From a problem and a preference to a decision."""

from __future__ import annotations

import functools

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.errors import KernelRefused
from gatewise.contract.problem import Problem
from gatewise.selection import admit
from gatewise.selection.preference import AUTO, preference


def decide(problem: Problem, device: Device, kernel: str = AUTO) -> Decision:
    """Return the decision for a problem under the user's preference; never raises for a refusal.

    Args:
        problem: What is to be computed.
        device: Where.
        kernel: The argument of the call: a name, or "auto".
    """
    wanted = preference(kernel)
    if wanted.kernel != AUTO:
        return _named(problem, device, wanted.kernel, wanted.source)
    if wanted.policy == "measure":
        from gatewise.selection.autotune import measured

        return measured(problem, device)
    return predicted(problem, device)


def choose(problem: Problem, device: Device, kernel: str = AUTO) -> Decision:
    """Return the decision for a problem, or raise when the kernel that was named cannot run it.

    Raises:
        KernelRefused: With the printed decision as its text.
    """
    decision = decide(problem, device, kernel)
    if decision.chosen is None:
        name = preference(kernel).kernel
        raise KernelRefused(f"the kernel {name!r} cannot run this call\n\n{decision}")
    return decision


@functools.lru_cache(maxsize=4096)
def predicted(problem: Problem, device: Device) -> Decision:
    """Choose the kernel with the least predicted time; equal times go to the earlier kernel."""
    verdicts = admit.verdicts(problem, device)
    accepted = [verdict for verdict in verdicts if verdict.seconds is not None]
    best = min(accepted, key=lambda verdict: verdict.seconds or 0.0)
    reason = "the only kernel that accepts" if len(accepted) == 1 else "least predicted time"
    return Decision(problem, device, verdicts, best.kernel, reason)


@functools.lru_cache(maxsize=4096)
def _named(problem: Problem, device: Device, name: str, source: str) -> Decision:
    verdicts = admit.verdicts(problem, device)
    accepted = next(verdict.accepted for verdict in verdicts if verdict.kernel == name)
    reason = source if accepted else f"{name!r} was {source} and refuses"
    return Decision(problem, device, verdicts, name if accepted else None, reason)

"""The policy "predict": choose the kernel with the least predicted time."""

from __future__ import annotations

import functools

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.selection import admit


@functools.lru_cache(maxsize=4096)
def predicted(problem: Problem, device: Device) -> Decision:
    """Choose the kernel with the least predicted time; among equal times, the first one."""
    verdicts = admit.verdicts(problem, device)
    accepted = able = [verdict for verdict in verdicts if verdict.seconds is not None]
    if problem.captured and not problem.announced:
        launched = predicted(problem.replace(captured=False), device).chosen
        able = [
            verdict
            for verdict in accepted
            if verdict.kernel == launched or admit.kernel_named(verdict.kernel).sets_up_in_captures(problem)
        ]
    best = min(able, key=lambda verdict: verdict.seconds or 0.0)
    least = "least predicted time of the device" if problem.captured else "least predicted time"
    reason = "the only kernel that accepts" if len(accepted) == 1 else least
    return Decision(problem, device, verdicts, best.kernel, reason)

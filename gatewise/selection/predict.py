"""The policy "predict": choose the kernel with the least predicted time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from gatewise.contract.decision import Decision, Verdict
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.selection import admit
from gatewise.selection.margin import margin

PYTORCHS_OWN = "aten"
"""The kernel that runs what PyTorch's own layers run on a CPU."""


@functools.lru_cache(maxsize=4096)
def predicted(problem: Problem, device: Device) -> Decision:
    """Choose the kernel with the least predicted time; among equal times, the first one.

    On a CPU, the algorithm of PyTorch's own layers stays where the predicted time of another kernel is less by no more
    than the standard error of such predictions (`margin`): the times of calls on a CPU vary with what else it does.
    """
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
    if device.kind == "cpu" and (usual := _as_close(best, able, problem, device)):
        reason = f"PyTorch's own: {best.kernel} is predicted to be faster by less than the error of predictions"
        best = usual
    return Decision(problem, device, verdicts, best.kernel, reason)


def _as_close(best: Verdict, able: Sequence[Verdict], problem: Problem, device: Device) -> Verdict | None:
    """Return the verdict of PyTorch's algorithm if its time is within the error of predictions of the least one."""
    usual = next((verdict for verdict in able if verdict.kernel == PYTORCHS_OWN), None)
    if usual is None or usual is best:
        return None
    longer = math.log((usual.seconds or 0.0) / (best.seconds or 0.0))
    return usual if longer <= margin(usual.kernel, best.kernel, problem, device) else None

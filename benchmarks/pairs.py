"""The CPU time of two calls that compute the same, which alternate in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Step = Callable[[], object]

SAMPLE, LONGEST = 300_000, 20_000_000  # nanoseconds


def compare(theirs: Step, ours: Step, seconds: float, longest: int = LONGEST) -> dict[str, Any] | None:
    """Time two calls in samples of about 0.3 ms or one call, and compare the CPU time of the thread.

    The 10 % quantile of the samples is what other programs on the machine disturb least.

    Args:
        theirs: The call to compare with.
        ours: The call of gatewise.
        seconds: The time for all samples of both in seconds; there are at least 20 of each.
        longest: The longest time of `theirs` in nanoseconds.

    Returns:
        Both times in microseconds, their ratio and the number of samples; None if `theirs` takes too long.
    """
    clock = time.thread_time_ns
    for step in (theirs, ours, theirs, ours):
        step()
    began = clock()
    theirs()
    one = clock() - began
    if one > longest:
        return None
    calls = max(1, SAMPLE // one)
    samples: tuple[list[float], list[float]] = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[0]) < 20:
        order = (0, 1) if len(samples[0]) % 2 else (1, 0)
        for place in order:
            step = (theirs, ours)[place]
            began = clock()
            for _ in range(calls):
                step()
            samples[place].append((clock() - began) / calls)
    low = [sorted(each)[len(each) // 10] / 1e3 for each in samples]
    ratio = round(low[1] / low[0], 3)
    return {"us": [round(each, 2) for each in low], "ratio": ratio, "samples": len(samples[0])}

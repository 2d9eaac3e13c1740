"""The time that settings take, by what it is spent on."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Iterator

PARTS = ("inputs", "calls", "compilation", "reference")
"""What the time of a setting is spent on: its tensors, the calls under test, compilation, and float64 with budgets."""
_COMPILER = "gatewise.kernels.cuda.toolchain"


class Times:
    """The seconds of one setting for each of `PARTS`.

    They are those of the process. What a GPU has not finished at the end of a part counts where the process next waits
    for it, because waiting earlier could hide that a call returns before its results are complete.
    """

    def __init__(self) -> None:
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Count the time of the block, except for the compilation of CUDA kernels in it, which is counted as such."""
        began = time.perf_counter()
        with _compiling() as compiled:
            try:
                yield
            finally:
                taken = time.perf_counter() - began
                self.seconds["compilation"] += min(compiled.seconds, taken)
                self.seconds[part] += max(0.0, taken - compiled.seconds)


class _Compilations(logging.Handler):
    """Adds up the times of compilations that the log reports."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Add the time of a compilation."""
        self.seconds += getattr(record, "seconds", 0.0)


@contextlib.contextmanager
def _compiling() -> Iterator[_Compilations]:
    log, handler = logging.getLogger(_COMPILER), _Compilations()
    before, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # these lines are for this handler alone
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        log.propagate = propagate

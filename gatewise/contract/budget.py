"""The memory that a call may take."""

from __future__ import annotations

import numbers

from gatewise.contract.errors import ArgumentError, sentence


def check_memory_budget(budget: object) -> None:
    """Check a number of bytes; infinity is no limit.

    Raises:
        ArgumentError: It is no number, not a number of bytes, or not positive.
    """
    if budget is None or (isinstance(budget, numbers.Real) and not isinstance(budget, bool) and float(budget) > 0):
        return
    advice = "Sizes such as '8GB' are for the command line." if isinstance(budget, str) else ""
    raise ArgumentError(sentence("memory_budget", "None or a positive number of bytes", repr(budget), advice))

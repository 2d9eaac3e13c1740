"""Check the argument `memory_budget`."""

from __future__ import annotations

import numbers

from gatewise.contract.errors import ArgumentError, sentence


def check_memory_budget(budget: object) -> None:
    """Check that a memory budget is None or a positive number of bytes; infinity means no limit.

    Raises:
        ArgumentError: The budget is neither None nor a positive number.
    """
    if budget is None or (isinstance(budget, numbers.Real) and not isinstance(budget, bool) and float(budget) > 0):
        return
    advice = "Sizes such as '8GB' are for the command line." if isinstance(budget, str) else ""
    raise ArgumentError(sentence("memory_budget", "None or a positive number of bytes", repr(budget), advice))

"""The multiprocessors of a GPU that kernels leave to other work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from gatewise.contract.errors import ArgumentError, sentence

# The argument of the innermost `reserve_multiprocessors` block of the running context; 0 outside of all blocks.
_reserved: ContextVar[int] = ContextVar("gatewise_reserved_multiprocessors", default=0)


@contextlib.contextmanager
def reserve_multiprocessors(count: int) -> Iterator[None]:
    """Leave multiprocessors of the GPU free in the calls of the block, and in their backward passes.

    The blocks of a kernel of `persistent` wait for each other, so that all of them must be on the GPU at once; most
    calls use every multiprocessor. If another kernel that waits, such as a collective of NCCL, has a part of the
    multiprocessors already and waits for other GPUs, and those wait for calls of `persistent`, neither can go on. In
    the block, calls use at most the multiprocessors of the GPU less `count`. A kernel that needs more is refused, and
    the decision says so.

    NCCL is limited to as many by the environment variable ``NCCL_MAX_CTAS``. The training of gatewise sets both.

    A compiled function keeps the reservation with which it was traced: put the block around its first call too.

    Args:
        count: The number of multiprocessors to leave free, 0 or more. Blocks do not add up; the innermost counts.

    Raises:
        ArgumentError: The number is negative or no integer.

    Example:
        >>> import torch, gatewise
        >>> lstm = gatewise.LSTM(4, 8)
        >>> with gatewise.reserve_multiprocessors(24):
        ...     y, (h_n, c_n) = lstm(torch.randn(5, 2, 4))
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ArgumentError(sentence("count", "an integer of 0 or more", repr(count)))
    token = _reserved.set(count)
    try:
        yield
    finally:
        _reserved.reset(token)


def reserved() -> int:
    """Return the number of multiprocessors that calls must leave free."""
    return _reserved.get()

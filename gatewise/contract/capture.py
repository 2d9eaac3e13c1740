"""Knowing whether work is recorded in a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

# What `for_cuda_graph` set for the running context; None where nothing is said.
_announced: ContextVar[bool | None] = ContextVar("gatewise_for_cuda_graph", default=None)


@contextlib.contextmanager
def for_cuda_graph(replayed: bool = True) -> Iterator[None]:
    """Choose kernels in the block for calls that a CUDA graph replays, by the time the device takes; or never so.

    Replays of a graph cost the CPU next to nothing, so the fastest kernel of a call that is replayed may be another one
    than that of the same call made from Python. The block belongs around the calls that warm up a capture and around
    the capture: they run the same kernels then, to the same bits. A capture without it is noticed too, but has fewer
    kernels to choose from: that of the calls before, and those that can set themselves up during a capture.

    Args:
        replayed: False to choose as for calls made from Python, also while a graph is captured: for replays that must
            have the bits of such calls.

    Example:
        >>> import torch, gatewise
        >>> lstm = gatewise.LSTM(4, 8)
        >>> with gatewise.for_cuda_graph():  # and torch.cuda.graph(...) around the same call
        ...     y, (h_n, c_n) = lstm(torch.randn(5, 2, 4))
    """
    token = _announced.set(replayed)
    try:
        yield
    finally:
        _announced.reset(token)


def state() -> str:
    """Return "announced" inside `for_cuda_graph`, "noticed" where the current CUDA stream is captured, otherwise ""."""
    announced = _announced.get()
    if announced is None:
        return "noticed" if torch.cuda.is_current_stream_capturing() else ""
    return "announced" if announced else ""

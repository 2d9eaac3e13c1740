"""Whether calls are captured in a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

# The argument of the innermost `for_cuda_graph` block of the running context; None outside of all blocks.
_announced: ContextVar[bool | None] = ContextVar("gatewise_for_cuda_graph", default=None)


@contextlib.contextmanager
def for_cuda_graph(replayed: bool = True) -> Iterator[None]:
    """Choose the kernels of calls in the block for CUDA graph replay, that is by their time on the device alone.

    Replaying a graph takes almost no CPU time. The kernel that is fastest in a replay can therefore differ from the
    kernel that is fastest when Python makes the call. Put the block around both the warm-up calls and the capture, so
    that they run the same kernels and return identical bits. A capture outside such a block is noticed as well, but has
    fewer kernels to choose from: the kernel that the warm-up calls ran, and the kernels that can be initialised during
    a capture.

    Args:
        replayed: False chooses kernels as for calls from Python, even while a graph is captured, for replays that must
            return the same bits as such calls.

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
    """Return "announced" inside `for_cuda_graph`, "noticed" if the current CUDA stream is captured, "" otherwise."""
    announced = _announced.get()
    if announced is None:
        return "noticed" if torch.cuda.is_current_stream_capturing() else ""
    return "announced" if announced else ""

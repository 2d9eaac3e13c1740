"""Capturing work in a CUDA graph, and finding out whether calls are captured."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

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

    Examples:
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


def captured_graph(
    work: Callable[[], object], *, pool: Any = None, stream: torch.cuda.Stream | None = None, mode: str = "global"
) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of what a function would do on the current CUDA device, without doing it.

    Args:
        work: The function to capture.
        pool: The memory pool of the graph, from `torch.cuda.graph_pool_handle`; None for a pool of its own.
        stream: The stream to capture on; None for one that all captures on the device share.
        mode: The `capture_error_mode` of `torch.cuda.graph`.

    Raises:
        RuntimeError: The function does something that cannot be captured, such as waiting for the device. Current
            stream, random number generator and memory allocator are then as before, also after errors of the function.
    """
    graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    stream = _stream_of(device) if stream is None else stream
    try:
        # `torch.cuda.graph` leaves its stream the current one if the end of the capture fails.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode),
        ):
            work()
    except BaseException:
        _abandon(device, pool)
        raise
    return graph


def first_cause(error: BaseException) -> str:
    """Return the first error in one line; ending a capture after an error raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).splitlines()), type(error).__name__)


@functools.cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """Return the stream of the captures on a device.

    The graphs of a memory pool use the same memory only if they are captured on one stream. `torch.cuda.graph` has one
    stream as well, but it is on the device of the first capture: captures on other devices would be empty.
    """
    return torch.cuda.Stream(device)


def _abandon(device: int, pool: Any) -> None:
    """Release what PyTorch (2.11) does not release if the end of a capture fails."""
    # Otherwise the allocator would never release memory that other streams have used, and would abort the process at
    # its end, when a `torch.cuda.MemPool` is deleted. The second name is that of PyTorch 2.6.
    functions = vars(torch._C)
    end = functions.get("_cuda_endAllocateToPool") or functions["_cuda_endAllocateCurrentStreamToPool"]
    with contextlib.suppress(RuntimeError):  # the allocator had ended the capture already
        end(device, pool)
        functions["_cuda_releasePool"](device, pool)
    _end_capture_of_generator(device)


def _end_capture_of_generator(device: int) -> None:
    """Let the random number generator of a device leave the capture that has failed.

    The end of a capture that succeeds does so, for the graphs too that were captured before and draw from the same
    state.
    """
    number = torch.zeros((), device=torch.device("cuda", device))
    try:
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_stream_of(device)),
        ):
            number.add_(1)
    except RuntimeError:
        generator = torch.cuda.default_generators[device]
        # The generator continues with a copy of its state that belongs to no capture.
        generator.graphsafe_set_state(generator.clone_state())

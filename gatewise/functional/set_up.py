"""What a kernel's first call does, permitted also where that call is captured in a CUDA graph."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def set_up_permitted() -> Iterator[None]:
    """Let the calling thread, during a capture, load code and reserve memory: what a kernel does in its first call.

    Calls that warm up a capture may have run other kernels than the one that is captured. What is set up is not part of
    the graph. Nothing changes for other threads, nor where there is no CUDA driver.
    """
    driver = _driver()
    if driver is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def _driver() -> ctypes.CDLL | None:
    # By ctypes: PyTorch's own kernels set themselves up too, where the packages of the extra `cuda` are missing.
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # none, or a system that names it differently: first calls then belong before the capture
        return None

"""Ctrl-C as a request: finish the step, save, then stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interruption:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.requested = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Turn the first SIGINT or SIGTERM into a flag; a second one stops at once, as usual.

    Outside the main thread, where Python cannot handle signals, the flag stays down.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        interruption.requested = True
        restore()

    for number in signals:
        signal.signal(number, request)
    try:
        yield interruption
    finally:
        restore()

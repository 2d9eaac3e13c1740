"""Ctrl-C and SIGTERM: before and after training they end the program; in it they are requests to save and stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interruption:
    """Whether a stop was requested."""

    def __init__(self) -> None:
        self.requested = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Turn the first SIGINT or SIGTERM into a flag; a second one stops the program at once, as usual.

    In other threads than the main thread, where Python cannot handle signals, the flag is never set.
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


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let the first SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that the program cleans up before it ends.

    Schedulers and containers stop programs by SIGTERM, and some send it twice: later ones are ignored. A handler that
    is there already stays. In other threads than the main thread, where Python cannot handle signals, nothing changes.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (interrupt, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

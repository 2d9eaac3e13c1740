"""The program `gatewise` while it loads: Ctrl-C is one line, with nothing to clean up, and help does without torch.

`gatewise` and `python -m gatewise` import this package, and with it torch, before any code of theirs runs; that takes
seconds. Where the package is imported by another program, nothing here does anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

INTERRUPTED = 130
MESSAGE = "Interrupted."


def is_program() -> bool:
    """Return whether this process was started as `gatewise` or as `python -m gatewise`."""
    first = sys.argv[0] if getattr(sys, "argv", None) else ""
    if first == "-m":  # as long as the package is being looked for
        words = sys.orig_argv
        return "gatewise" in words[words.index("-m") + 1 :][:1] if "-m" in words else False
    return os.path.splitext(os.path.basename(first))[0] == "gatewise"  # noqa: PTH119, PTH122 - pathlib is not loaded yet


def lists_commands() -> bool:
    """Return whether this process is the program and no more than lists its commands or prints its version."""
    return is_program() and sys.argv[1:2] in ([], ["--help"], ["-h"], ["--version"])


def leave(number: int, frame: FrameType | None) -> None:
    """End at once: an exception might get lost in whatever is being imported."""
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)


def loaded() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, so that a command can clean up."""
    _exchange(leave, signal.default_int_handler)


def ended(interrupted: bool) -> None:
    """End at once after an interruption; otherwise let Ctrl-C do that while the interpreter ends.

    The interpreter would end by a signal, not with the status of an interruption, where it was executing text.
    """
    if PROGRAM and interrupted:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(INTERRUPTED)
    if PROGRAM:
        _exchange(signal.default_int_handler, leave)


def _exchange(before: Any, after: Any) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, after)


PROGRAM = is_program()
LISTING = lists_commands()
if PROGRAM:
    _exchange(signal.default_int_handler, leave)

"""The start of the program `gatewise`: Ctrl-C ends it with one line, and help does not import torch.

`gatewise` and `python -m gatewise` import this package, and torch with it, before any of their code runs, which takes
seconds. If another program imports the package, this module does nothing.
"""

from __future__ import annotations

import contextlib
import gc
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
    if first == "-m":  # while Python is searching for the module
        words = sys.orig_argv
        return "gatewise" in words[words.index("-m") + 1 :][:1] if "-m" in words else False
    return os.path.splitext(os.path.basename(first))[0] == "gatewise"  # noqa: PTH119, PTH122 - pathlib is not loaded yet


def lists_commands() -> bool:
    """Return whether this process is the program and only lists its commands or prints its version."""
    return is_program() and sys.argv[1:2] in ([], ["--help"], ["-h"], ["--version"])


def leave(number: int, frame: FrameType | None) -> None:
    """Exit at once, because an exception could be swallowed by a module that is being imported."""
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)


def loaded() -> None:
    """Restore KeyboardInterrupt for Ctrl-C, so that commands can clean up; collect garbage except modules from now."""
    _exchange(leave, signal.default_int_handler)
    if PROGRAM:
        # Modules stay until the end. Each full collection of garbage would go through their 200,000 objects again.
        gc.freeze()
        gc.enable()


def ended(interrupted: bool) -> None:
    """Exit at once after an interruption; otherwise handle Ctrl-C so while the interpreter exits.

    If the interpreter exited by itself after an interruption, its status could be that of a signal.
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
    gc.disable()  # importing makes next to none, but looking for it would take a tenth of the time

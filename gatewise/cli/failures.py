"""How the program ends after an error: with one sentence on standard error and an exit status, without a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn, TextIO

from gatewise._program import INTERRUPTED, MESSAGE
from gatewise.contract.errors import MEMORY_SHORTAGE, FolderError, GatewiseError, ProcessFailed

FAILURE = 1
"""The exit status of a command that was understood, and failed."""

USAGE = 2
"""The exit status of a command that cannot be meant so: an option or an argument is missing, unknown or wrong."""

_OF_THE_COMMAND_LINE = re.compile(r"(?:[^`]+: )?`(--\w|[A-Z]+`)")


@contextlib.contextmanager
def reported(advice: Callable[[], str] = lambda: "Reduce the sizes, or close other programs.") -> Iterator[None]:
    """Print one sentence and exit if an error of the user, of the disk or of the memory leaves the block.

    Args:
        advice: A function that returns the advice for too little memory.

    Raises:
        SystemExit: With status 130 after Ctrl-C, with that of `status_of` after an error of gatewise, otherwise with 1.
    """
    try:
        with _threads_that_write():
            yield
    except ProcessFailed:
        sys.exit(1)  # the error was printed when this process received it
    except GatewiseError as error:
        fail(str(error), status_of(error))
    except KeyboardInterrupt:
        _interrupted()
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it; that is no error.
        _discard_output()
        sys.exit(1)
    except OSError as error:
        _discard_output()
        fail(_sentence_of(error))
    except (MemoryError, RuntimeError, ImportError) as error:
        if "KeyboardInterrupt" in str(error):  # compiled modules pass it on as text
            _interrupted()
        if not isinstance(error, MemoryError) and not MEMORY_SHORTAGE.search(str(error)):
            raise
        fail(f"there is too little memory: {_first_line(error)} {advice()}")


def write_any_character() -> None:
    """Make standard output escape the characters that its encoding lacks, as standard error does.

    Texts in any language would otherwise end a run with an error where the encoding is that of an old locale.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Flush standard output, so that an error is reported here and not by the interpreter at exit."""
    if sys.stdout is not None:
        sys.stdout.flush()


def status_of(error: GatewiseError) -> int:
    """Return the exit status after an error: that of Typer's own errors if it is about an option or an argument.

    Such an error begins with their names: options as they are written, and arguments in capital letters, perhaps after
    the path of a recipe with the wrong value. That a folder cannot be used now, because its disk is full, is a failure
    of the same command that may succeed later.
    """
    return USAGE if _OF_THE_COMMAND_LINE.match(str(error)) and not isinstance(error, FolderError) else FAILURE


def fail(message: str, status: int = FAILURE) -> NoReturn:
    """Print an error on standard error, and exit."""
    print_error(message)
    sys.exit(status)


def print_error(message: str) -> None:
    """Print an error on standard error, with the text of the exception."""
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        try:
            from rich.console import Console
            from rich.markup import escape
        except ModuleNotFoundError:
            print(f"error: {message}", file=sys.stderr)
        else:
            console = Console(stderr=True, highlight=False)
            console.print(f"[bold red]error:[/bold red] {escape(message)}", soft_wrap=not console.is_terminal)


def print_warning(message: str) -> None:
    """Print a warning on standard error."""
    with contextlib.suppress(OSError, ValueError):  # standard error is closed
        print(f"warning: {message}", file=sys.stderr)


def _interrupted() -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        print(MESSAGE, file=sys.stderr)
    sys.exit(INTERRUPTED)


def _sentence_of(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {reason}. Check the path, its permissions and the free space on its disk."
    return f"the output cannot be written: {reason}. Free space on its disk, or redirect it elsewhere."


def _first_line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if line.endswith(".") else f"{line}."


def _discard_output() -> None:
    """Discard the buffered output, so that the interpreter does not fail to write it at exit."""
    for stream in (sys.stdout, sys.stderr):
        if not _writes(stream):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _writes(stream: TextIO) -> bool:
    try:
        stream.flush()
    except (OSError, ValueError, AttributeError):
        return False
    return True


@contextlib.contextmanager
def _threads_that_write() -> Iterator[None]:
    """Suppress the error of TensorBoard's thread when it cannot write: the next summary raises it again."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard")):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before

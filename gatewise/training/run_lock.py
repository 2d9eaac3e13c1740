"""A lock on the folder of a run, which the system releases whenever and however the process ends."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import socket
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows has no flock, so runs are not locked there
    fcntl = None

_SIGNATURE = b'{"pid": '
"""The first bytes of a lock's file, which names the process that holds the lock."""
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""The errors of file systems without locks."""


class RunLock:
    """A lock that lets only one process at a time write to a folder.

    Args:
        folder: The folder, which must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".gatewise-run.lock"
        self._descriptor: int | None = None

    def acquire(self) -> str:
        """Acquire the lock, or return who holds it.

        Returns:
            An empty string if this process holds the lock now, or if locks are not supported; otherwise a description
            of the process that holds it.

        Raises:
            OSError: The folder cannot be written, or has a file of this name that gatewise did not write.
        """
        while fcntl is not None:
            if self._path.is_symlink():
                raise self._foreign()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 1000, 0)
                os.close(descriptor)
                return _described(holder)
            except OSError as error:
                os.close(descriptor)
                if error.errno not in _UNSUPPORTED:
                    raise
                return ""
            if self._is(descriptor):
                # An empty file is that of a process that could not write its name to a full disk.
                if not (os.pread(descriptor, len(_SIGNATURE), 0) or _SIGNATURE).startswith(_SIGNATURE):
                    os.close(descriptor)
                    raise self._foreign()
                self._descriptor = descriptor
                self._sign(descriptor)
                return ""
            os.close(descriptor)  # the process that held the lock has just ended and removed the file
        return ""

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _foreign(self) -> OSError:
        return FileExistsError(
            errno.EEXIST, f"It has a file {self._path.name} that gatewise did not write", str(self._path)
        )

    def _is(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    @staticmethod
    def _sign(descriptor: int) -> None:
        since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        with contextlib.suppress(OSError):  # on a full disk, the lock works without the process's name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _described(holder: bytes) -> str:
    try:
        found = json.loads(holder)
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"

"""The only module that writes files: a file holds either its old or its new content, never a part of it.

A regular file is replaced atomically: the new content is written to a temporary folder beside it, flushed to the disk,
and renamed. A symbolic link is followed, so that the link stays and its target is replaced. A device, a FIFO or a file
descriptor of this process such as `/dev/stdout` is written to directly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from gatewise.contract.errors import ArgumentError, CheckpointError, sentence

TEMPORARY = ".gatewise-unfinished-"
"""The prefix of the names of temporary folders."""

_MOST_LINKS = 40
_UNTOUCHED = "Its old content is unchanged. Free space on the disk, or choose another folder."
_NO_FILE = {
    errno.ENOENT: "Create the folder first, or choose another one.",
    errno.ENOTDIR: "Choose another folder.",
    errno.EISDIR: "Choose the name of a file.",
}
"""The advice where there can be no file at a path, by the number of the error."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Args:
        path: The file, device or FIFO to write.
        content: The new content.

    Raises:
        CheckpointError: The file cannot be written; its old content is unchanged.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a file atomically, as UTF-8; see `write_bytes`."""
    write_bytes(path, content.encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces `path` when the block ends without an exception.

    Args:
        path: The file, device or FIFO to write.

    Yields:
        A path with the same file name in an empty temporary folder, which is removed at the end.

    Raises:
        CheckpointError: The file cannot be written; its old content is unchanged.
    """
    with _sentences(path):
        before = _found(path)
        into = _stream(path, before)
        if into is None and before is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        target = Path(os.path.realpath(path))
        beside = target.parent if into is None else None
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=beside))
    try:
        with _sentences(path):
            yield folder / target.name
            if into is None:
                _replace(folder / target.name, target, before)
            else:
                with (folder / target.name).open("rb") as content, into() as stream:
                    shutil.copyfileobj(content, stream)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def append_line(path: Path, line: str) -> None:
    """Append a whole line to a file or nothing; the file and its folder are created if they are missing.

    Args:
        path: The path of the file.
        line: The line without a line end.

    Raises:
        CheckpointError: The file cannot be written; its old content is unchanged.
    """
    with _sentences(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno())
            content = memoryview(f"{line}\n".encode())
            try:
                while content:
                    content = content[file.write(content) :]
                if stat.S_ISREG(before.st_mode):
                    os.fsync(file.fileno())
            except OSError:
                if stat.S_ISREG(before.st_mode):
                    with contextlib.suppress(OSError):
                        file.truncate(before.st_size)
                raise


def refuse_overwriting(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]) -> None:
    """Raise if an output is also an input or another output, under whatever path it is named, or is named `-`.

    Args:
        outputs: The files to write, by the names of their options; None for outputs that are not requested.
        inputs: The files that are read, in the same form.

    Raises:
        ArgumentError: Two names refer to one regular file, or a file would be named as other programs name their
            standard output.
    """
    taken = [(name, path) for name, path in inputs.items() if path is not None]
    for name, path in outputs.items():
        if path is None:
            continue
        if str(path) == "-":
            raise ArgumentError(sentence(name, "the path of a file", "-", "Name a file."))
        for other, its in taken:
            if same_file(path, its):
                what = "which it would overwrite" if other in inputs else "which is written as well"
                advice = f"That is the file of `{other}`, {what}. Choose another name."
                raise ArgumentError(sentence(name, "a file of its own", str(path), advice))
        taken.append((name, path))


def irregular(path: Path) -> str | None:
    """Return why a path cannot be read as a whole, and what to do: a device or a pipe may have no end, or be read once.

    Args:
        path: The path.

    Returns:
        The sentence; None for regular files and folders, and if there is nothing at the path.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    return f"{path} must be a regular file, got {kind}. Write its content to a file, and give that one."


def written_through(path: Path) -> bool:
    """Return whether a path is written to directly: a device, a FIFO, or a file descriptor of this process."""
    return _descriptor(path) is not None or irregular(path) is not None


def same_file(one: Path, other: Path) -> bool:
    """Return whether two paths refer to one regular file, which need not exist yet."""
    try:
        found = one.stat(), other.stat()
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other) and not one.exists()
    return os.path.samestat(*found) and stat.S_ISREG(found[0].st_mode)


@contextlib.contextmanager
def _sentences(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # An error raised by a library may have a message but no error number.
        reason = error.strerror or str(error)
        advice = _NO_FILE.get(error.errno or 0, _UNTOUCHED)
        raise CheckpointError(f"{path} cannot be written: {reason}. {advice}") from error


def _found(path: Path) -> os.stat_result | None:
    """Return the status of the file at `path`, or None if there is none.

    Raises:
        OSError: The path is a folder, or a loop of symbolic links.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return found


def _stream(path: Path, found: os.stat_result | None) -> Callable[[], IO[bytes]] | None:
    """Return a function that opens the output stream, or None if `path` is a regular file or does not exist yet."""
    descriptor = _descriptor(path)
    if descriptor is not None:

        def duplicate() -> IO[bytes]:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # text printed earlier must come first
                    stream.flush()
            return os.fdopen(os.dup(descriptor), "wb")

        return duplicate
    if found is not None and not stat.S_ISREG(found.st_mode):
        return lambda: path.open("wb", buffering=0)
    return None


def _descriptor(path: Path) -> int | None:
    """Return the descriptor in `/dev/stdout`, `/dev/fd/1` and the like; opening these anew would lose the position."""
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if path.name.isdecimal() and re.fullmatch(rf"/dev/fd|/proc/{os.getpid()}(/task/\d+)?/fd", folder):
            return int(path.name)
        path = Path(folder, path.name)
        if not path.is_symlink():
            return None
        path = Path(folder, path.readlink())
    return None


def _replace(temporary: Path, target: Path, before: os.stat_result | None) -> None:
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    if before is not None:
        with contextlib.suppress(OSError):  # a file of another user may be readable through its group
            os.chown(temporary, before.st_uid, before.st_gid)
        with contextlib.suppress(OSError):
            temporary.chmod(stat.S_IMODE(before.st_mode))
    temporary.replace(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, on systems that can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

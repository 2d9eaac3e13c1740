"""Notification of all processes of a distributed training when one of them fails, whatever they are waiting for.

When a process fails, the others hang in a collective; with NCCL, their GPUs wait for the missing GPU. So each process
has a separate connection to the first one, and a thread that reads from it. A process that fails sends the reason
before it exits. If a process is killed, the system closes its connection immediately. Nothing depends on a timeout, so
a process that is busy for minutes is not mistaken for dead.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gatewise.contract.errors import GatewiseError, ProcessFailed

GRACE_SECONDS = 15.0
"""The time in seconds in which a process must exit by itself after another one failed; then its thread ends it."""

_CONNECT_SECONDS = 60.0
_FAREWELL_SECONDS = 5.0
_NEWS_SECONDS = 2.5
"""The largest time in seconds between the first effect of a failure and its message."""

_LONGEST_LINE = 1 << 20


class Failure(NamedTuple):
    """A failure of another process.

    Attributes:
        rank: The rank of the process that failed.
        reason: The reason that it sent.
    """

    rank: int
    reason: str

    def __str__(self) -> str:
        """Return the failure as a sentence."""
        return f"process {self.rank} failed: {self.reason}"


class FailureChannel:
    """The connections between the first process and the others.

    Args:
        rank: The rank of this process.
        connections: The connection to the first process; in the first process, the connections to all others by rank.
        release: A function that ends collectives for which the main thread waits; it is called in the channel's thread
            after a failure of another process.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], release: Callable[[], None]) -> None:
        self._rank, self._release = rank, release
        self._connections = connections
        self._lock = threading.Lock()
        self._heard: Failure | None = None
        self._failed_itself = False
        self._known, self._gone, self._left = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, name="gatewise failures", daemon=True)
        self._thread.start()

    def heard(self, seconds: float = 0.0) -> Failure | None:
        """Return the failure of another process, or None; wait for it for at most the given time."""
        self._known.wait(seconds)
        return self._heard

    def tell(self, reason: str) -> None:
        """Tell the other processes that this process failed; the connections stay open until it exits."""
        self._failed_itself = True
        self._left.set()
        self._send({"failed": self._rank, "reason": reason[: _LONGEST_LINE // 8]})

    def leave(self) -> None:
        """Tell the other processes that this process is done, and close the connections."""
        self._left.set()
        self._send({"done": self._rank})
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(_FAREWELL_SECONDS)

    def give_way(self) -> None:
        """Let the failed process exit first, so that the launcher reports that one."""
        self._left.set()
        self._gone.wait(_FAREWELL_SECONDS)

    def _send(self, message: dict[str, Any], without: int = -1) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for rank, connection in self._connections.items():
                if rank != without:
                    with contextlib.suppress(OSError):  # that process has exited already
                        connection.sendall(line)

    def _read(self) -> None:
        selector, rest = selectors.DefaultSelector(), dict.fromkeys(self._connections, b"")
        for rank, connection in self._connections.items():
            selector.register(connection, selectors.EVENT_READ, rank)
        while rest:
            for key, _ in selector.select():
                rank = key.data
                try:
                    content = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                except OSError:
                    content = b""
                *lines, rest[rank] = (rest[rank] + content).split(b"\n")
                done = not content or len(rest[rank]) > _LONGEST_LINE
                for line in lines:
                    done |= self._hear(json.loads(line), rank)
                if done:
                    selector.unregister(key.fileobj)
                    del rest[rank]
                    if not content:
                        self._lost(rank)
        selector.close()

    def _hear(self, message: dict[str, Any], sender: int) -> bool:
        """Handle a message; return whether its sender will send nothing more."""
        if "failed" in message:
            self._note(Failure(message["failed"], message["reason"]), sender)
        elif "gone" in message and self._heard is not None and message["gone"] == self._heard.rank:
            self._gone.set()
        return "done" in message

    def _lost(self, rank: int) -> None:
        """Handle a closed connection."""
        if self._left.is_set() and self._heard is None:
            return
        self._note(Failure(rank, "it exited without a message, as if it was killed"), rank)
        if self._heard is not None and rank in (self._heard.rank, 0):
            self._gone.set()
        if self._rank == 0:
            self._send({"gone": rank}, without=rank)

    def _note(self, failure: Failure, sender: int) -> None:
        if self._heard is not None or failure.rank == self._rank:
            return
        self._heard = failure
        if self._rank == 0:
            self._send({"failed": failure.rank, "reason": failure.reason}, without=sender)
        if not self._failed_itself:
            # Print at once, because a launcher ends all processes as soon as one has exited.
            print(f"error: {failure}", file=sys.stderr, flush=True)
            threading.Thread(target=self._end, name="gatewise end", daemon=True).start()
        self._known.set()

    def _end(self) -> None:
        """End the process if its main thread does not exit in time."""
        threading.Thread(target=self._release, name="gatewise release", daemon=True).start()
        if not self._left.wait(GRACE_SECONDS):
            os._exit(1)


@contextlib.contextmanager
def notifying_failures(
    rank: int, count: int, broadcast: Callable[[Any], Any], release: Callable[[], None], abort: Callable[[], None]
) -> Iterator[None]:
    """Notify the other processes if the block fails, and react to their failures.

    Args:
        rank: The rank of this process.
        count: The number of processes.
        broadcast: A function that returns the first process's value in all processes.
        release: A function that ends collectives for which the main thread waits; it is called in another thread.
        abort: A function that leaves the process group; it is called in the main thread.

    Raises:
        ProcessFailed: Another process failed; this process has already printed the reason.
    """
    channel = FailureChannel(rank, _connections(rank, count, broadcast), release)
    try:
        yield
    except BaseException as error:
        # Collectives raise a RuntimeError if another process is gone; the reason is the message of that process.
        of_a_peer = isinstance(error, RuntimeError) and not isinstance(error, GatewiseError)
        failure = channel.heard(_NEWS_SECONDS if of_a_peer else 0.0)
        if failure is not None and of_a_peer:
            abort()
            channel.give_way()
            raise ProcessFailed(str(failure)) from error
        channel.tell(str(error) if isinstance(error, GatewiseError) else f"{type(error).__name__}: {error}")
        abort()
        raise
    channel.leave()


def _connections(rank: int, count: int, broadcast: Callable[[Any], Any]) -> dict[int, socket.socket]:
    """Connect the first process with all others; a token, broadcast in the process group, excludes strangers."""
    host = os.environ["MASTER_ADDR"]
    try:
        if rank:
            port, token = broadcast(None)
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
            connection.sendall(f"{token} {rank}\n".encode())
            connection.settimeout(None)
            return {0: connection}
        with socket.create_server((host if _is_here(host) else "", 0), backlog=count) as server:
            token = secrets.token_hex(16)
            broadcast((server.getsockname()[1], token))
            return _accepted(server, count, token)
    except OSError as error:
        problem = (
            f"process {rank} must be able to connect to process 0 at {host}, on any port, got: {error}. Check the "
            "network and MASTER_ADDR."
        )
        print(f"error: {problem}", file=sys.stderr, flush=True)  # like all failures of processes
        raise ProcessFailed(problem) from error


def _accepted(server: socket.socket, count: int, token: str) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + _CONNECT_SECONDS
    while len(found) < count - 1:
        server.settimeout(max(0.001, end - time.monotonic()))
        connection, _ = server.accept()
        connection.settimeout(_FAREWELL_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            # Unbuffered, because everything after this line belongs to the channel.
            said, number = connection.makefile("rb", buffering=0).readline(100).split()
            if hmac.compare_digest(said, token.encode()) and 0 < int(number) < count:
                connection.settimeout(None)
                found[int(number)] = connection
                continue
        connection.close()
    return found


def _is_here(host: str) -> bool:
    """Return whether a host name refers to this machine only locally."""
    return host == "localhost" or host.startswith("127.")

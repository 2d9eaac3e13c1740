"""How processes that train together hear that one of them failed, whatever they are waiting for.

A process that fails leaves the others in a collective that never ends: over NCCL they wait for a GPU that waits for
another GPU. So each process has a connection to the first one beside its collectives, and a thread that reads it. A
process that fails says why before it goes; one that is killed says nothing, but the system closes its connection at
once. Nothing is asked for in intervals, so a process that is busy for minutes is not taken for dead.
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
"""How long a process may take to end by itself after another one failed; then its thread ends it."""

_CONNECT_SECONDS = 60.0
_FAREWELL_SECONDS = 5.0
_NEWS_SECONDS = 2.5
"""How long the news of a failure may take after its first consequence."""

_LONGEST_LINE = 1 << 20


class Failure(NamedTuple):
    """What was heard.

    Attributes:
        rank: Which process failed.
        reason: What it said.
    """

    rank: int
    reason: str

    def __str__(self) -> str:
        """Return what the others say of it."""
        return f"process {self.rank} failed: {self.reason}"


class FailureChannel:
    """The connections between the first process and the others.

    Args:
        rank: The number of this process.
        connections: To the first process; in that one, to each of the others by rank.
        release: Called in the channel's thread when another process has failed: ends what the main thread waits for.
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
        """Return the failure of another process; wait for the news of one."""
        self._known.wait(seconds)
        return self._heard

    def tell(self, reason: str) -> None:
        """Tell the others that this process failed; its connections stay open for as long as it lives."""
        self._failed_itself = True
        self._left.set()
        self._send({"failed": self._rank, "reason": reason[: _LONGEST_LINE // 8]})

    def leave(self) -> None:
        """Tell the others that this process is done, and close the connections."""
        self._left.set()
        self._send({"done": self._rank})
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(_FAREWELL_SECONDS)

    def give_way(self) -> None:
        """Let the process that failed end first, so that it is what a launcher reports."""
        self._left.set()
        self._gone.wait(_FAREWELL_SECONDS)

    def _send(self, message: dict[str, Any], without: int = -1) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for rank, connection in self._connections.items():
                if rank != without:
                    with contextlib.suppress(OSError):  # it has gone already
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
        """Take notice of a message; return whether its sender has nothing more to say."""
        if "failed" in message:
            self._note(Failure(message["failed"], message["reason"]), sender)
        elif "gone" in message and self._heard is not None and message["gone"] == self._heard.rank:
            self._gone.set()
        return "done" in message

    def _lost(self, rank: int) -> None:
        """Take notice that a connection was closed."""
        if self._left.is_set() and self._heard is None:
            return
        self._note(Failure(rank, "it ended without a word, as a process does that is killed"), rank)
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
            # At once: a launcher ends all processes as soon as it sees that one has ended.
            print(f"error: {failure}", file=sys.stderr, flush=True)
            threading.Thread(target=self._end, name="gatewise end", daemon=True).start()
        self._known.set()

    def _end(self) -> None:
        """End the process if its main thread does not."""
        threading.Thread(target=self._release, name="gatewise release", daemon=True).start()
        if not self._left.wait(GRACE_SECONDS):
            os._exit(1)


@contextlib.contextmanager
def failures_told(
    rank: int, count: int, told: Callable[[Any], Any], release: Callable[[], None], abort: Callable[[], None]
) -> Iterator[None]:
    """Tell the other processes if the block fails, and hear of their failures.

    Args:
        rank: The number of this process.
        count: How many there are.
        told: Returns the first process's value in all of them.
        release: Ends what the main thread waits for, called from another thread.
        abort: Lets go of the other processes, in the main thread.

    Raises:
        ProcessFailed: Another process failed, which this one has already printed.
    """
    channel = FailureChannel(rank, _connections(rank, count, told), release)
    try:
        yield
    except BaseException as error:
        # What a collective raises when a peer is gone is no failure of this process: there will be news of that one.
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


def _connections(rank: int, count: int, told: Callable[[Any], Any]) -> dict[int, socket.socket]:
    """Connect the first process with each of the others; a token, told by way of the group, keeps strangers out."""
    host = os.environ["MASTER_ADDR"]
    try:
        if rank:
            port, token = told(None)
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
            connection.sendall(f"{token} {rank}\n".encode())
            connection.settimeout(None)
            return {0: connection}
        with socket.create_server((host if _is_here(host) else "", 0), backlog=count) as server:
            token = secrets.token_hex(16)
            told((server.getsockname()[1], token))
            return _accepted(server, count, token)
    except OSError as error:
        problem = (
            f"process {rank} must be able to connect to process 0 at {host}, on any port, got: {error}. Check the "
            "network and MASTER_ADDR."
        )
        print(f"error: {problem}", file=sys.stderr, flush=True)  # as every failure of processes
        raise ProcessFailed(problem) from error


def _accepted(server: socket.socket, count: int, token: str) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + _CONNECT_SECONDS
    while len(found) < count - 1:
        server.settimeout(max(0.001, end - time.monotonic()))
        connection, _ = server.accept()
        connection.settimeout(_FAREWELL_SECONDS)
        with contextlib.suppress(OSError, ValueError):
            # Without a buffer: what comes after the line is for the channel.
            said, number = connection.makefile("rb", buffering=0).readline(100).split()
            if hmac.compare_digest(said, token.encode()) and 0 < int(number) < count:
                connection.settimeout(None)
                found[int(number)] = connection
                continue
        connection.close()
    return found


def _is_here(host: str) -> bool:
    """Whether a name is that of this machine for itself alone."""
    return host == "localhost" or host.startswith("127.")

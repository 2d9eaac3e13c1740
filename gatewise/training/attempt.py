"""The processes of one attempt of torchrun, which starts all processes again after a failure."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from typing import Any

from torch import distributed
from torch.distributed import PrefixStore, Store

from gatewise.contract.errors import ProcessFailed

_SECONDS = 300.0
"""The time in seconds in which all processes of an attempt must arrive."""

_PAUSE = 0.02


def rendezvous() -> dict[str, Any]:
    """Return the arguments of `init_process_group` by which the processes of one attempt find each other.

    torchrun's store lives as long as torchrun itself, so that it may still hold the addresses of processes that ended.
    The agents of several machines do not count attempts alike (``TORCHELASTIC_RESTART_COUNT``): one may see that a
    process of its own failed, another one only that the first one gathers all agents again. So the processes agree on
    keys of their own, see `attempt_of`.

    Raises:
        ProcessFailed: A process did not arrive within five minutes.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store, rank, count = next(iter(distributed.rendezvous("env://")))
    name = attempt_of(store, rank, count)
    return {"store": PrefixStore(f"attempt {name}", store), "rank": rank, "world_size": count}


def attempt_of(store: Store, rank: int, count: int, seconds: float = _SECONDS) -> str:
    """Return a name for the processes that start together, the same in all of them and never used before.

    Each process draws a token. The first one proposes a list of the tokens that it finds, under a new name, until all
    processes whose tokens are in the list have joined it. A token of a process that ended is replaced as soon as the
    process is started again, and the list is proposed anew, so that no process of an earlier attempt can take part.

    Args:
        store: The store, with any contents of earlier attempts.
        rank: The rank of this process.
        count: The number of processes.
        seconds: The time in which all processes must arrive.

    Raises:
        ProcessFailed: A process did not arrive in time.
    """
    token, end = secrets.token_hex(8), time.monotonic() + seconds
    if rank:
        store.set(_token_of(rank), token)
    proposed: list[str] = []
    name = ""
    while time.monotonic() < end:
        if rank == 0 and (found := _tokens(store, count)) is not None and found != proposed:
            proposed, name = found, token + secrets.token_hex(8)
            store.set("proposal", json.dumps([name, proposed]))
        elif rank and store.check(["proposal"]):
            proposal, tokens = json.loads(store.get("proposal"))
            if proposal != name and tokens[rank - 1 : rank] == [token] and len(tokens) == count - 1:
                name = proposal
                store.set(f"{name} joined by {rank}", "")
        if rank == 0 and name and store.check([f"{name} joined by {other}" for other in range(1, count)]):
            store.set(f"{name} complete", "")
            return name
        if rank and name and store.check([f"{name} complete"]):
            return name
        time.sleep(_PAUSE)
    problem = (
        f"process {rank} must start together with the other {count - 1} processes, which did not all arrive within "
        f"{seconds:g} seconds. Read what torchrun printed on every machine."
    )
    print(f"error: {problem}", file=sys.stderr, flush=True)  # like all failures of processes
    raise ProcessFailed(problem)


def _tokens(store: Store, count: int) -> list[str] | None:
    """Return the tokens of all processes but the first, or None if one has not arrived."""
    keys = [_token_of(rank) for rank in range(1, count)]
    return [store.get(key).decode() for key in keys] if store.check(keys) else None


def _token_of(rank: int) -> str:
    return f"token of {rank}"

"""A run of trials in one or several processes, and its results."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from gatewise.testing.trials.run import Outcome, outcomes_of, trials
from gatewise.testing.trials.setting import Setting
from gatewise.testing.trials.shrink import shrunk

_MOST_SHRUNK = 2
_MOST_WRONG = 40
_SHRINKING = 60  # the maximum number of settings tried to reduce a failure
_SHRINKING_SECONDS = 20.0


@dataclasses.dataclass
class Tally:
    """The results of trials.

    Attributes:
        tried: The number of settings that were tested.
        refused: The number of settings whose named kernel refused them.
        unjudged: The number of tensors that could not be checked, because PyTorch's own error is infinite.
        kinds: The number of settings with each mode and kernel.
        wrong: For each failure, a small program that reproduces it, and a description of the original setting and
            error.
    """

    tried: int = 0
    refused: int = 0
    unjudged: int = 0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the results of another process."""
        self.tried += other.tried
        self.refused += other.refused
        self.unjudged += other.unjudged
        self.kinds += other.kinds
        self.wrong += other.wrong


def run_session(device: str, seed: int, seconds: float, most: int, processes: int, sizes: int | None = None) -> Tally:
    """Run trials in one or several processes, and return their combined results.

    Args:
        device: "cpu" or "cuda".
        seed: The seed of the first process; each further process adds 1.
        seconds: The time after which no new setting is started.
        most: The number of settings of all processes after which no new one is started; 0 for any number.
        processes: The number of processes, which are spread over the GPUs; 1 runs in the current process.
        sizes: The seed of the sizes to draw from, which all processes share; None means `seed`.
    """
    sizes = seed if sizes is None else sizes
    each = -(-most // processes)
    if processes == 1:
        return _worker(device, seed, seconds, each, sizes, 0)
    total = Tally()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        tasks = [
            pool.submit(_worker, device, seed + number, seconds, each, sizes, number) for number in range(processes)
        ]
        for task in tasks:
            total.add(task.result())
    return total


def _worker(device: str, seed: int, seconds: float, most: int, sizes: int, number: int) -> Tally:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    tally = Tally()
    with _process_group(device):
        for outcome in trials(device, seed, seconds, most, sizes):
            _count(tally, outcome)
            if len(tally.wrong) == _MOST_WRONG:
                break  # so many failures suggest that the process itself is broken
    return tally


def _count(tally: Tally, outcome: Outcome) -> None:
    if outcome.refused:
        tally.refused += 1
        return
    tally.tried += 1
    tally.unjudged += outcome.unjudged
    tally.kinds.update([f"mode {outcome.setting.mode}", f"kernel {outcome.setting.kernel}"])
    if outcome.lines:
        said = f"{outcome.setting}: {_short(outcome.lines)}"
        print(f"wrong: {said}", file=sys.stderr, flush=True)
        setting = _smallest(outcome) if len(tally.wrong) < _MOST_SHRUNK else outcome.setting
        tally.wrong.append((setting.program(), said))


def _short(lines: Sequence[str]) -> str:
    return "; ".join(lines)[:600]


def _smallest(outcome: Outcome) -> Setting:
    """Return a small setting that fails in the same way; the setting itself if it does not fail on its own."""
    end = time.monotonic() + _SHRINKING_SECONDS

    def fails(setting: Setting) -> bool:
        if time.monotonic() > end:
            return False
        (found,) = outcomes_of([setting])
        return found.kind == outcome.kind

    return shrunk(outcome.setting, fails, _SHRINKING) if fails(outcome.setting) else outcome.setting


@contextlib.contextmanager
def _process_group(device: str) -> Iterator[None]:
    """Create a process group of one process, for `DistributedDataParallel`."""
    if device != "cuda":
        yield
        return
    # Not NCCL: its watchdog thread queries events, which invalidates captures of other threads.
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/{socket.gethostname()}-{os.getpid()}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()

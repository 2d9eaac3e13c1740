"""A run of trials in one or several processes, and its results."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from gatewise.testing.trials.run import Outcome, outcomes_of, trials
from gatewise.testing.trials.setting import Setting, program_of
from gatewise.testing.trials.shrink import shrunk
from gatewise.testing.trials.times import PARTS

_MOST_SHRUNK = 2
_MOST_WRONG = 40
_SHRINKING = 60  # the maximum number of settings tried to reduce a failure
_SHRINKING_SECONDS = 20.0
_SLOW = 20.0  # seconds after which a setting is reported
_HANGS = 60.0  # seconds after which a call of a setting that does not end is a failure


@dataclasses.dataclass
class Tally:
    """The results of trials.

    Attributes:
        tried: The number of settings that were tested.
        refused: The number of settings whose named kernel refused them.
        unjudged: The number of tensors that could not be checked, because PyTorch's own error is infinite.
        selected_otherwise: The number of settings whose results are right only for the other choice of selections
            between nearly equal numbers; see `Budget.select_otherwise`.
        kinds: The number of settings with each mode and kernel, and of those that are `large_tf32`.
        wrong: For each failure, a small program that reproduces it, and a description of the original setting and
            error.
        seconds: The seconds of all processes, for each of `times.PARTS`.
        seconds_of_kinds: The seconds of the settings with each mode, kernel and cell.
        slow: A description of each setting that took more than 20 seconds.
        unfinished: A description of each setting that was still running when the time was over; those of which one call
            ran for a minute or more are in `wrong` instead.
    """

    tried: int = 0
    refused: int = 0
    unjudged: int = 0
    selected_otherwise: int = 0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    seconds_of_kinds: dict[str, float] = dataclasses.field(default_factory=dict)
    slow: list[str] = dataclasses.field(default_factory=list)
    unfinished: list[str] = dataclasses.field(default_factory=list)

    def count(self, outcome: Outcome, program: str) -> None:
        """Count the outcome of a setting.

        Args:
            outcome: The outcome.
            program: A program that shows the failure, if it is one.
        """
        for part, seconds in outcome.seconds.items():
            self.seconds[part] += seconds
        setting, taken = outcome.setting, sum(outcome.seconds.values())
        if taken > _SLOW:
            parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in outcome.seconds.items())
            self.slow.append(f"{taken:.1f} s ({parts}): {setting}")
        if outcome.refused:
            self.refused += 1
            return
        self.tried += 1
        self.unjudged += outcome.unjudged
        self.selected_otherwise += outcome.selected_otherwise and not outcome.lines
        kinds = [f"mode {setting.mode}", f"kernel {setting.kernel}"]
        self.kinds.update([*kinds, "large TF32"] if setting.large_tf32 else kinds)
        for kind in (*kinds, f"cell {setting.cell}"):
            self.seconds_of_kinds[kind] = self.seconds_of_kinds.get(kind, 0.0) + taken
        if outcome.lines:
            self.wrong.append((program, f"{setting}: {_short(outcome.lines)}"))

    def shrink(self, program: str, smaller: str) -> None:
        """Replace the program that shows a failure by a smaller one."""
        self.wrong = [(smaller if shown == program else shown, said) for shown, said in self.wrong]


def run_session(
    device: str,
    seed: int,
    seconds: float,
    most: int,
    processes: int,
    sizes: int | None = None,
    *,
    reference: str = "auto",
    grace: float = 30.0,
    tally: Tally | None = None,
) -> Tally:
    """Run trials in one or several processes, and return their combined results.

    Args:
        device: "cpu" or "cuda".
        seed: The seed of the first process; each further process adds 1.
        seconds: The time after which no new setting is started.
        most: The number of settings of all processes after which no new one is started; 0 for any number.
        processes: The number of processes, which are spread over the GPUs; 1 runs in the current process.
        sizes: The seed of the sizes to draw from, which all processes share; None means `seed`.
        reference: The device of the float64 reference: "cpu", "gpu", or "auto" for the faster one.
        grace: The seconds after `seconds` for which settings that are running may continue; then their processes are
            ended. It has no effect with one process.
        tally: The results to add to, which are complete at any time, also if this function is interrupted.
    """
    tally = Tally() if tally is None else tally
    sizes = seed if sizes is None else sizes
    each = -(-most // processes)
    if processes == 1:
        counted: dict[str, _Report] = {"found": tally.count, "shrunk": tally.shrink}
        report: _Report = lambda kind, *sent: counted[kind](*sent) if kind in counted else None  # noqa: E731
        _run(report, device, seed, seconds, each, sizes, 0, reference)
        return tally
    end, context = time.monotonic() + seconds, get_context("spawn")
    running: dict[Connection, _Process] = {}
    try:
        for number in range(processes):
            here, there = context.Pipe(duplex=False)
            given = (there, device, seed + number, end, each, sizes, number, reference)
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            there.close()
            running[here] = _Process(process, reference)
        while running and (left := end + grace - time.monotonic()) > 0:
            for ready in connection.wait(list(running), left):
                assert isinstance(ready, Connection)
                try:
                    goes_on = running[ready].receive(ready, tally)
                except (EOFError, OSError):
                    running[ready].died(tally)
                    goes_on = False
                if not goes_on:
                    del running[ready]
    finally:
        for pipe, process in running.items():
            process.stop(pipe, tally)
    return tally


_Report = Callable[..., object]
"""A function that is called with what a process does, as listed in `_run`."""


@dataclasses.dataclass
class _Process:
    """A process of the session, as seen by the one that counts.

    Attributes:
        process: The process.
        reference: The device of the float64 reference.
        left: The settings that it has begun, and whose outcomes it has not sent.
        at: The setting of which it is running a call; None between settings.
        shrinks: The setting with a failure that it is reducing; None if it is not.
        since: The time at which it last sent anything.
    """

    process: BaseProcess
    reference: str = "auto"
    left: list[Setting] = dataclasses.field(default_factory=list)
    at: Setting | None = None
    shrinks: Setting | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)

    def receive(self, pipe: Connection, tally: Tally) -> bool:
        """Count what the process has sent; return whether it goes on."""
        kind, *sent = pipe.recv()
        if kind == "failed":
            self._failed(tally, *sent)
        self.since, self.at, self.shrinks = time.monotonic(), None, None
        match kind, sent:
            case "begun", (settings,):
                self.left = [*settings]
            case "at", (setting,):
                self.at = setting
            case "found", (outcome, program):
                self.left = [setting for setting in self.left if setting != outcome.setting]
                tally.count(outcome, program)
            case "shrinking", (setting,):
                self.shrinks = setting
            case "shrunk", (program, smaller):
                tally.shrink(program, smaller)
        return kind not in ("failed", "done")

    def died(self, tally: Tally) -> None:
        """Count the end of a process that ended without a word as a failure."""
        self.process.join(5)
        self._failed(tally, f"process ended with {self.process.exitcode}")

    def stop(self, pipe: Connection, tally: Tally) -> None:
        """End the process, and count what it has sent before and what it has not finished."""
        self.process.kill()
        self.process.join(5)
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                if not self.receive(pipe, tally):
                    return
        reason = "still running when the time was over"
        if self.at is not None and time.monotonic() - self.since >= _HANGS:
            self._failed(tally, reason)
        elif self.left:
            tally.unfinished.append(self._said(reason))

    def _failed(self, tally: Tally, reason: str) -> None:
        running = self._running()
        program = program_of(*running, reference=self.reference) if running else ""
        tally.wrong.append((program, self._said(reason)))

    def _running(self) -> list[Setting]:
        """Return the settings that may be the cause if the process does not go on, the most likely one first."""
        first = self.at or self.shrinks
        return self.left if first is None else [first, *(setting for setting in self.left if setting != first)]

    def _said(self, reason: str) -> str:
        running = "; ".join(map(str, self._running()))
        doing = f" while a failure was reduced: {running}" if self.shrinks else f" of: {running}" if running else ""
        return f"{reason}, after {time.monotonic() - self.since:.0f} s{doing}"


def _work(
    pipe: Connection, device: str, seed: int, end: float, most: int, sizes: int, number: int, reference: str
) -> None:
    """Run trials in a process of its own, and send what it does."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the session ends its processes itself
        signal.signal(ignored, signal.SIG_IGN)
    seconds = end - time.monotonic()  # the clock is that of the machine; imports have taken some of the time
    try:
        _run(lambda *sent: pipe.send(sent), device, seed, seconds, most, sizes, number, reference)
    except Exception as error:  # noqa: BLE001  whatever it is, the session has to know
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
    else:
        pipe.send(("done",))


def _run(
    report: _Report, device: str, seed: int, seconds: float, most: int, sizes: int, number: int, reference: str
) -> None:
    """Run trials and report what is done.

    The reports are `("begun", settings)`, `("at", setting)` before each call, `("found", outcome, program)` with a
    program that shows the failure, if it is one, `("shrinking", setting)`, and `("shrunk", program, smaller program)`.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    wrong = 0
    begun, at = functools.partial(report, "begun"), functools.partial(report, "at")
    with _process_group(device):
        for outcome in trials(device, seed, seconds, most, sizes, reference=reference, begun=begun, at=at):
            program = program_of(outcome.setting, reference=reference) if outcome.lines else ""
            report("found", outcome, program)
            if not outcome.lines:
                continue
            wrong += 1
            print(f"wrong: {outcome.setting}: {_short(outcome.lines)}", file=sys.stderr, flush=True)
            if wrong <= _MOST_SHRUNK:
                report("shrinking", outcome.setting)
                report("shrunk", program, program_of(_smallest(outcome, reference), reference=reference))
            if wrong == _MOST_WRONG:
                return  # so many failures suggest that the process itself is broken


def _short(lines: Sequence[str]) -> str:
    return "; ".join(lines)[:600]


def _smallest(outcome: Outcome, reference: str) -> Setting:
    """Return a small setting that fails in the same way; the setting itself if it does not fail on its own.

    Args:
        outcome: The outcome of a setting that fails.
        reference: The device of the float64 reference.
    """
    end = time.monotonic() + _SHRINKING_SECONDS

    def fails(setting: Setting) -> bool:
        if time.monotonic() > end:
            return False
        (found,) = outcomes_of([setting], reference)
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

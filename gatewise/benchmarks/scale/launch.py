"""The start of the processes of the benchmark by torchrun, and their answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gatewise.benchmarks.record import FAILED
from gatewise.benchmarks.scale.worker import Task
from gatewise.contract.errors import GatewiseError

_WORKER = "gatewise.benchmarks.scale.worker"
_PAUSE = 0.1
_ENDING = 45.0
"""The time in seconds that torchrun gets to end its processes, which it first asks and then kills after 30 seconds."""


class WorkersFailed(GatewiseError):
    """The processes of the benchmark failed or did not answer in time."""


def answers(task: Task, processes: int, limit: float, worker: str = _WORKER) -> Iterator[dict[str, Any]]:
    """Start processes and yield their answers as they come; end the processes at the end.

    Args:
        task: The task, whose `answers` are set here.
        processes: The number of processes.
        limit: The largest time in seconds between two answers.
        worker: The module that the processes run.

    Raises:
        WorkersFailed: A process failed, or there was no answer within the limit.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "printed").open("w+") as printed:
        task = dataclasses.replace(task, answers=str(Path(folder) / "answers"))
        with _started(task, processes, worker, printed) as launcher:
            yield from _answers(Path(task.answers), launcher, processes, limit, printed)


def _answers(
    path: Path, launcher: subprocess.Popen[bytes], processes: int, limit: float, printed: IO[str]
) -> Iterator[dict[str, Any]]:
    read, doing, heard = 0, "starting", time.monotonic()
    while True:
        ended = launcher.poll()  # before the file is read, so that nothing is missed
        content = path.read_text("utf-8") if path.exists() else ""
        lines = content[read:].splitlines(keepends=True)
        for line in lines:
            if not line.endswith("\n"):
                break
            read += len(line)
            heard = time.monotonic()
            answer = json.loads(line)
            if answer.get("status") == FAILED:
                raise WorkersFailed(f"one of {_number(processes)} failed while {doing}: {answer['note']}")
            doing = f"measuring '{answer['begins']}', batch {answer['batch']}" if "begins" in answer else doing
            yield answer
        if ended == 0:
            return
        if ended is not None:
            reason = f"status {ended}" if ended > 0 else f"signal {-ended}"
            raise WorkersFailed(
                f"{_number(processes)} ended with {reason} while {doing}, and gave no reason. The last line that was "
                f"printed: {_last_line(printed)}"
            )
        if time.monotonic() - heard > limit:
            advice = "Give more time with `--limit`, or look for a process that hangs."
            raise WorkersFailed(f"{_number(processes)} gave no answer for {limit:g} seconds while {doing}. {advice}")
        time.sleep(_PAUSE)


@contextlib.contextmanager
def _started(task: Task, processes: int, worker: str, printed: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, "-m", worker, json.dumps(dataclasses.asdict(task))]
    # One thread each on a CPU: otherwise a single process would use the cores that several share.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING)
        if process.poll() is None:
            process.kill()
            process.wait()


def _last_line(printed: IO[str]) -> str:
    printed.seek(0)
    return next((line.strip() for line in reversed(printed.read().splitlines()) if line.strip()), "none")


def _number(processes: int) -> str:
    return "one process" if processes == 1 else f"{processes} processes"

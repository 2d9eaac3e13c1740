"""Processes that train together, as torchrun would start them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import time
import traceback

import pytest

from gatewise.training import exchange
from gatewise.training import processes as of_processes
from gatewise.training.processes import join_processes
from tests.programs import free_port, of_several, processes_that_start_fast

COUNT = 2


@contextlib.contextmanager
def all_are_large():
    """Send every gradient by itself, as if it was large."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (exchange, of_processes):
            patch.setattr(module, "LARGE_BYTES", 1)
        yield


class Recorder:
    """A stand-in for CUDA graphs that counts captures and replays, in which it calls the function; it can refuse."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.records, self.replays = refuses, 0, 0

    def __call__(self, work):
        self.records += 1
        if self.refuses:
            raise RuntimeError(self.refuses)

        def replay():
            self.replays += 1
            work()

        return replay


def together(folder, jobs, device="cpu", context=None, seconds=120.0, count=COUNT):
    """Run jobs one after the other, each in all processes at the same time.

    Args:
        folder: An empty folder.
        jobs: The jobs by name: a function of `Processes` and keyword arguments, and these arguments.
        device: The device of all processes; "cuda" gives each its own GPU.
        context: The `multiprocessing` context that starts them.
        seconds: The time in seconds after which they are killed.
        count: The number of processes.

    Returns:
        The results of the jobs by name, one for each process; failed jobs and those after them are missing.
    """
    port = free_port()
    context = context or processes_that_start_fast()
    workers = [
        context.Process(target=_work, args=(rank, count, port, folder, jobs, device, seconds)) for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    end = time.monotonic() + seconds
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.exitcode is None:
            worker.kill()
            worker.join()
    paths = {name: [_path(folder, name, rank) for rank in range(count)] for name in jobs}
    return {
        name: [pickle.loads(path.read_bytes()) for path in each]
        for name, each in paths.items()
        if all(path.exists() for path in each)
    }


def _work(rank, count, port, folder, jobs, device, seconds):
    faulthandler.dump_traceback_later(0.9 * seconds)  # a process that is killed has shown where it was
    os.environ.update(of_several(rank, count, port))
    with join_processes(device) as processes:
        for name, (job, arguments) in jobs.items():
            try:
                result = job(processes, **arguments)
            except Exception:
                print(f"{name}, process {rank}: {traceback.format_exc()}", flush=True)
                raise
            _path(folder, name, rank).write_bytes(pickle.dumps(result))
            processes.barrier()
    faulthandler.cancel_dump_traceback_later()


def _path(folder, name, rank):
    return folder / f"{name}.{rank}"

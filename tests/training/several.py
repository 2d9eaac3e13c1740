"""Two processes that train together, as torchrun would start them."""

from __future__ import annotations

import faulthandler
import os
import pickle
import time
import traceback

from gatewise.training.processes import join_processes
from tests.programs import free_port, of_several, processes_that_start_fast

COUNT = 2


class Recorder:
    """Counts how often work is recorded and repeated, which here is to do it again; refuses with a sentence if told."""

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


def together(folder, jobs, device="cpu", context=None, seconds=120.0):
    """Do jobs one after the other, each in both processes at once.

    Args:
        folder: An empty one.
        jobs: A function of `Processes` and keyword arguments, and the latter, by name.
        device: Of both processes; "cuda" gives each its own.
        context: Starts them.
        seconds: After which they are killed.

    Returns:
        What the jobs returned, by name, one value a process; a job that failed, and those behind it, are missing.
    """
    port = free_port()
    context = context or processes_that_start_fast()
    workers = [context.Process(target=_work, args=(rank, port, folder, jobs, device, seconds)) for rank in range(COUNT)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + seconds
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.exitcode is None:
            worker.kill()
            worker.join()
    paths = {name: [_path(folder, name, rank) for rank in range(COUNT)] for name in jobs}
    return {
        name: [pickle.loads(path.read_bytes()) for path in both]
        for name, both in paths.items()
        if all(path.exists() for path in both)
    }


def _work(rank, port, folder, jobs, device, seconds):
    faulthandler.dump_traceback_later(0.9 * seconds)  # who is killed has told where it was
    os.environ.update(of_several(rank, COUNT, port))
    with join_processes(device) as processes:
        for name, (job, arguments) in jobs.items():
            try:
                result = job(processes, **arguments)
            except Exception:
                print(f"{name}, process {rank}: {traceback.format_exc()}", flush=True)
                raise
            _path(folder, name, rank).write_bytes(pickle.dumps(result))
            processes.wait()
    faulthandler.cancel_dump_traceback_later()


def _path(folder, name, rank):
    return folder / f"{name}.{rank}"

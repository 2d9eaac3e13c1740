"""Several threads of a new process compile their first kernels at the same time."""

import sys
import threading

import pytest

from gatewise.kernels.cuda import toolchain
from tests.programs import processes_that_start_fast


def _load_in_threads(pipe):
    if "cuda.core" in sys.modules:
        pipe.send("it was imported before the threads began")
        return
    sys.setswitchinterval(1e-5)  # threads are interrupted in the middle of imports
    together, found = threading.Barrier(8), []

    def load():
        together.wait()
        found.append(toolchain._core().Program)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(len(found))


def test_all_of_them_find_the_compiler():
    pytest.importorskip("cuda.core")
    context = processes_that_start_fast()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_load_in_threads, args=(there,), daemon=True)
    process.start()
    there.close()
    assert here.recv() == 8
    process.join()

"""Two GPUs with NCCL: if one process fails or computes NaN, both exit, although the other waits for its GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time

import pytest
import torch
from echo_model import Batch, Echoes, train
from faulty_model import faulty_model
from several import COUNT
from test_failures import KILLED

from gatewise.contract.errors import KernelFault, ProcessFailed
from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import CHECKPOINT
from gatewise.training.processes import join_processes

pytestmark = pytest.mark.gpu


class Share(Echoes):
    """One half of each batch on the GPU; the failure is before batch number 70 of the second epoch."""

    def __init__(self, rank, how="", length=120, **kind):
        super().__init__(length=length, part=slice(4 * rank, 4 * rank + 4), **kind)
        self.how = how

    def windows(self, epoch=0, start=0):
        for number, batch in enumerate(super().windows(epoch, start), start):
            if (epoch, number) == (1, 70):
                if self.how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "raises":
                    raise ValueError("the data is broken")
                if self.how == "waits":  # like a collective that the other process never joins
                    torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
                    torch.cuda.synchronize()
            yield Batch(batch.x.cuda(), batch.y.cuda())


def _work(rank, port, folder, how, failing):
    os.environ.update(WORLD_SIZE=str(COUNT), RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="localhost",
                      MASTER_PORT=str(port))  # fmt: skip
    os.dup2(os.open(folder / f"printed.{rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    try:
        with join_processes("cuda") as processes:
            own = how if rank == failing else ("waits" if how.startswith("waits") else "")
            data = Share(rank, own.removeprefix("waits for "))
            number = 70 if how == "nan" and rank == failing else None
            model = faulty_model(number, 1, data=data).cuda()
            train(folder / "run", model, data, Share(rank, length=5, seed=1), processes=processes,
                  reference=model.reference())  # fmt: skip
    except (ValueError, KernelFault, ProcessFailed) as error:
        (folder / f"told.{rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


CASES = [("raises", 0), ("raises", 1), ("killed", 0), ("killed", 1), ("waits for raises", 1), ("waits for killed", 0)]


@pytest.fixture(autouse=True)
def two_gpus():
    if torch.cuda.device_count() < COUNT:
        pytest.skip("needs two GPUs")


def ended(folder, how, failing):
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    workers = [context.Process(target=_work, args=(rank, port, folder, how, failing)) for rank in range(COUNT)]
    for worker in workers:
        worker.start()
    workers[failing].join(120)
    end = time.monotonic() + 30
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.exitcode is None:
            worker.kill()
            pytest.fail(f"hangs: {(folder / f'printed.{1 - failing}').read_text()}")
    printed = [(folder / f"printed.{rank}").read_text() for rank in range(COUNT)]
    told = [folder / f"told.{rank}" for rank in range(COUNT)]
    return workers, printed, [each.read_text() if each.exists() else "" for each in told]


@pytest.mark.parametrize(("how", "failing"), CASES)
def test_a_process_that_fails_ends_both(tmp_path, how, failing):
    workers, printed, _ = ended(tmp_path, how, failing)
    reason = KILLED if how.endswith("killed") else "ValueError: the data is broken"
    assert f"error: process {failing} failed: {reason}" in printed[1 - failing].splitlines()
    assert all(worker.exitcode for worker in workers)
    assert read_tensors(RunFolder(tmp_path / "run").checkpoint, CHECKPOINT)[1]["step"] == 120


def test_a_fault_in_one_process_is_told_by_both(tmp_path):
    _, _, told = ended(tmp_path, "nan", 1)
    assert told[0] == told[1]
    assert told[0].startswith("KernelFault: step 191 of training (epoch 2, batch 71)")
    assert "in process 1 when it was repeated there" in told[0]
    assert RunFolder(tmp_path / "run").fault.exists()

"""Several processes train as one."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from echo_model import Echoes, echo_model, train
from test_resumption import StopAt, files_of, processes_that_start_fast

from gatewise.contract.errors import ArgumentError, CheckpointError
from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import CHECKPOINT
from gatewise.training.processes import Processes, join_processes

OPTIONS = {"epochs": 2, "clip": 0.05}


def work(rank, port, folder, stop_at, options, queue):
    os.environ.update(
        WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    with join_processes("cpu") as processes:
        own = slice(4 * rank, 4 * rank + 4)
        data = StopAt(Echoes(part=own), stop_at if rank == 1 else 0)
        model = echo_model(dropout=options.pop("dropout", 0.0))
        valid = Echoes(length=5, seed=1, part=own)
        outcome, model = train(folder, model, data, valid, processes=processes, **options)
        queue.put((rank, outcome.step, outcome.interrupted, [each.detach().numpy() for each in model.parameters()]))


def together(folder, stop_at=0, **options):
    """Train with two processes over gloo; return for each its steps, whether it was stopped, and its weights."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = processes_that_start_fast()
    queue = context.Queue()
    workers = [
        context.Process(target=work, args=(rank, port, folder, stop_at, OPTIONS | options, queue)) for rank in (0, 1)
    ]
    for worker in workers:
        worker.start()
    results = sorted((queue.get(timeout=120) for _ in workers), key=lambda result: result[0])
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return results


def history(folder):
    return [
        (entry["train_loss"], entry["valid_loss"])
        for entry in read_tensors(RunFolder(folder).checkpoint, CHECKPOINT)[1]["history"]
    ]


def test_two_processes_have_the_losses_of_one(tmp_path):
    _, alone = train(tmp_path / "one", echo_model(dropout=0.0), **OPTIONS)
    (_, _, _, first), (_, _, _, second) = together(tmp_path / "two")
    for one, other, expected in zip(first, second, alone.parameters(), strict=True):
        assert (one == other).all()
        assert torch.allclose(torch.from_numpy(one), expected, rtol=1e-4, atol=1e-6)
    for one, other in zip(history(tmp_path / "one"), history(tmp_path / "two"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_the_share_of_each_process_matters(tmp_path):
    """Losing one half of the batch would not go unnoticed in the test above."""
    train(tmp_path / "half", echo_model(dropout=0.0), Echoes(part=slice(4)), **OPTIONS)
    train(tmp_path / "one", echo_model(dropout=0.0), **OPTIONS)
    assert history(tmp_path / "half")[0][0] != pytest.approx(history(tmp_path / "one")[0][0], rel=1e-3)


def test_an_interruption_in_any_process_stops_all_and_the_rest_follows_in_the_same_bits(tmp_path):
    options = {"dropout": 0.3, "epochs": 3}
    together(tmp_path / "whole", **options)
    stopped = together(tmp_path / "parts", stop_at=10, **options)
    assert [(step, interrupted) for _, step, interrupted, _ in stopped] == [(25, True), (25, True)]
    together(tmp_path / "parts", **options)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "parts")
    with pytest.raises(
        CheckpointError, match=r"made by 2 processes, here are 1. Resume with: torchrun --nproc-per-node 2"
    ):
        train(tmp_path / "parts", echo_model(dropout=0.3))


def test_alone_nothing_is_exchanged():
    alone = Processes(0, 1, torch.device("cpu"))
    model = echo_model()
    assert alone.parallel(model) is model
    assert alone.first
    assert (alone.any(True), alone.any(False)) == (True, False)
    assert alone.gathered("x") == ["x"]
    assert alone.told("x") == "x"


@pytest.mark.parametrize("device", ["gpu", "cud", "meta", "cpu:x"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ArgumentError, match="`device` must be cpu, cuda or cuda:N, got"), join_processes(device):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ArgumentError, match=r"`device` must be .*No GPU was found; use cpu"), join_processes("cuda"):
        pass

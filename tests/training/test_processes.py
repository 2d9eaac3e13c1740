"""Several processes train like one, with or without CUDA graphs."""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import NamedTuple

import pytest
import torch
from echo_model import Diary, Echoes, echo_model, train
from several import Recorder, together
from test_resumption import StopAt, files_of
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from gatewise.contract.errors import ArgumentError, CheckpointError
from gatewise.training import RunFolder, TrainingOptions, read_tensors
from gatewise.training import processes as processes_module
from gatewise.training.graph import WARMUPS, ReplayedStep, cuda_graphs
from gatewise.training.loop import CHECKPOINT
from gatewise.training.optimizers import build_optimizer
from gatewise.training.processes import Processes, join_processes
from gatewise.training.step import Step
from tests.programs import under_torchrun

OPTIONS = {"epochs": 2, "clip": 0.05}


def fitted(processes, folder, stop_at=0, dropout=0.0, seed=0, recorded=False, refuses="", **options):
    """Train an `EchoModel` together; return the losses, and the weights of this process."""
    rank = processes.rank
    own = slice(4 * rank, 4 * rank + 4)
    data = StopAt(Echoes(part=own), stop_at if rank == 1 else 0)
    model = echo_model(seed + (rank if seed else 0), dropout=dropout)
    recorder, diary = Recorder(refuses if rank == 1 else ""), Diary()
    outcome, model = train(
        folder,
        model,
        data,
        Echoes(length=5, seed=1, part=own),
        processes=processes,
        record_step=recorder if recorded else None,
        observers=[diary] if processes.first else [],
        **(OPTIONS | options),
    )
    return {
        "step": outcome.step,
        "interrupted": outcome.interrupted,
        "weights": [each.detach().numpy() for each in model.parameters()],
        "recorder": (recorder.records, recorder.replays),
        "remarks": diary.remarks,
    }


def same(one, other):
    return all((first == second).all() for first, second in zip(one, other, strict=True))


def history(folder):
    return [
        (entry["train_loss"], entry["valid_loss"])
        for entry in read_tensors(RunFolder(folder).checkpoint, CHECKPOINT)[1]["history"]
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The results of two processes in runs of each kind, and the folders of these."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "launched": {},
        "replayed": {"recorded": True},
        "different beginnings": {"seed": 7},
        "not recordable in one": {"recorded": True, "refuses": "CUDA out of memory"},
    }
    jobs = {name: (fitted, {"folder": folder / name} | options) for name, options in kinds.items()}
    for part in ("launched", "replayed"):
        whole = {"dropout": 0.3, "epochs": 3, "recorded": part == "replayed"}
        jobs[f"{part} whole"] = (fitted, {"folder": folder / f"{part} whole"} | whole)
        jobs[f"{part} stopped"] = (fitted, {"folder": folder / f"{part} parts", "stop_at": 10} | whole)
        jobs[f"{part} resumed"] = (fitted, {"folder": folder / f"{part} parts"} | whole)
    results = tmp_path_factory.mktemp("results")
    return folder, together(results, jobs)


@pytest.mark.parametrize("kind", ["launched", "replayed"])
def test_two_processes_have_the_losses_of_one(runs, tmp_path, kind):
    folder, found = runs
    _, alone = train(tmp_path / "one", echo_model(dropout=0.0), **OPTIONS)
    first, second = (each["weights"] for each in found[kind])
    assert same(first, second)
    for one, expected in zip(first, alone.parameters(), strict=True):
        assert torch.allclose(torch.from_numpy(one), expected, rtol=1e-4, atol=1e-6)
    for one, other in zip(history(tmp_path / "one"), history(folder / kind), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_the_share_of_each_process_matters(tmp_path):
    """Ignoring one half of the batch would be detected by the test above."""
    train(tmp_path / "half", echo_model(dropout=0.0), Echoes(part=slice(4)), **OPTIONS)
    train(tmp_path / "one", echo_model(dropout=0.0), **OPTIONS)
    assert history(tmp_path / "half")[0][0] != pytest.approx(history(tmp_path / "one")[0][0], rel=1e-3)


def test_replays_end_in_the_bits_of_steps(runs):
    folder, found = runs
    assert files_of(folder / "launched") == files_of(folder / "replayed")
    replays = 2 * 20 - 2 - WARMUPS  # the first of an epoch has no state
    assert [each["recorder"] for each in found["replayed"]] == [(1, replays)] * 2
    assert [each["remarks"] for each in found["replayed"]] == [["steps are replayed as one CUDA graph"], []]


def test_all_begin_with_the_weights_of_the_first(runs):
    _, found = runs
    first, second = (each["weights"] for each in found["different beginnings"])
    assert same(first, second)
    assert not same(first, found["launched"][0]["weights"])


def test_what_one_cannot_record_none_replays(runs):
    folder, found = runs
    first, second = found["not recordable in one"]
    assert (first["recorder"], second["recorder"]) == ((1, 0), (1, 0))
    assert first["remarks"] == ["steps are not captured as a CUDA graph: CUDA out of memory (process 1)"]
    assert files_of(folder / "launched") == files_of(folder / "not recordable in one")


@pytest.mark.parametrize("kind", ["launched", "replayed"])
def test_an_interruption_in_any_process_stops_all_and_the_rest_follows_in_the_same_bits(runs, kind):
    folder, found = runs
    assert [(each["step"], each["interrupted"]) for each in found[f"{kind} stopped"]] == [(25, True), (25, True)]
    assert files_of(folder / f"{kind} whole") == files_of(folder / f"{kind} parts")
    assert files_of(folder / "launched whole") == files_of(folder / f"{kind} whole")
    remedy = "Resume with as many; on one machine: torchrun --nproc-per-node 2"
    with pytest.raises(CheckpointError, match=f"made by 2 processes in total, here are 1. {remedy}"):
        train(folder / f"{kind} parts", echo_model(dropout=0.3))


class Rows(NamedTuple):
    x: torch.Tensor


class Sometimes(nn.Module):
    """A model with a weight that only long batches use, and a buffer that counts rows."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.long = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, batch, state):
        self.rows += len(batch.x)
        weights = self.always + self.long if len(batch.x) > 4 else self.always
        return (batch.x * weights - 1).square().mean(), None


def of_different_shapes(processes, recorded, sizes):
    """Take steps on batches of these sizes; return losses, weights, the buffer, and the captures."""
    device, options = processes.device, TrainingOptions(optimizer="sgd", learning_rate=0.1, clip=0.0)
    model = Sometimes().to(device)
    weights, recorder = list(model.parameters()), Recorder()
    capture = recorder if device.type == "cpu" else cuda_graphs(processes)
    step = Step(model, build_optimizer(weights, options), 0.0, "float32", device, processes=processes)
    replayed = ReplayedStep(step, capture, print, weights, processes, step.expect)
    generator, losses, replays = torch.Generator().manual_seed(processes.rank), [], []
    with contextlib.closing(replayed):
        for size in sizes[processes.rank]:
            batch = Rows(torch.randn(size, 6, generator=generator).to(device))
            losses.append(float((replayed if recorded else step)(batch, None)[0]))
            replays.append((recorder.replays, replayed.shapes))
    return losses, [each.detach().cpu().numpy() for each in weights], float(model.rows), replays


def exchanges(processes):
    """Average and broadcast tensors of every kind; return them with the expected values."""
    rank, generator = processes.rank, torch.Generator().manual_seed(0)
    found, expected, firsts = [], [], []
    for shape in ((3,), (), (1, 5), (600, 600), (0,)):
        for dtype in (torch.float32, torch.float64):
            both = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2)]
            for turned in (False, True):
                mine = both[rank].clone()
                found.append(mine.t().contiguous().t() if turned and mine.ndim == 2 else mine)
                expected.append((both[0] + both[1]) / 2)
                firsts.append(both[0])
    spread = [each.clone() if each.is_contiguous() else each.t().clone().t() for each in found]
    processes.start_average(found)()
    processes.broadcast_tensors(each for each in spread if each.numel())
    strides = [each.stride() for each in spread] == [each.stride() for each in found]
    averaged = all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    own = rank == 0 or not torch.equal(expected[0], firsts[0])
    from_first = all(not spread[i].numel() or torch.equal(spread[i], firsts[i]) for i in range(len(firsts))) or rank
    return averaged and strides and own and bool(from_first)


def agreements(processes):
    return (
        processes.all_gather_number(2**50 + processes.rank),
        (processes.any(False), processes.any(processes.rank == 1)),
        processes.all_gather("a" * (processes.rank + 1)),
        processes.gather(processes.rank),
        processes.broadcast(processes.rank),
    )


# Shapes change in one process or in both; all combinations occur often enough to be captured.
SIZES = [[8, 5, 3, 8, 3, 5] * 9, [2, 2, 3, 8, 8, 3] * 9]


@pytest.fixture(scope="module")
def small_jobs(tmp_path_factory):
    shapes = {
        f"shapes {recorded}": (of_different_shapes, {"recorded": recorded, "sizes": SIZES}) for recorded in (0, 1)
    }
    jobs = shapes | {"exchanges": (exchanges, {}), "agreements": (agreements, {})}
    return together(tmp_path_factory.mktemp("results"), jobs)


def test_shapes_may_differ_between_processes(small_jobs):
    launched, replayed = small_jobs["shapes 0"], small_jobs["shapes 1"]
    for rank in range(2):
        assert launched[rank][0] == replayed[rank][0], "losses"
        assert same(launched[rank][1], replayed[rank][1])
    (_, first, _, when), (_, second, _, also) = replayed
    assert same(first, second)
    assert when == also, "both replay at the same steps"
    assert when[-1] == (6 * (9 - WARMUPS), 6)


def test_a_weight_that_has_no_part_in_a_share_counts_as_zero(small_jobs):
    (losses, first, _, _), (_, second, _, _) = small_jobs["shapes 0"]
    assert same(first, second)
    assert abs(first[1] - 1).min() > 0.01
    assert losses[-1] != losses[0]


def test_buffers_are_those_of_the_first_process_and_its_own_last_rows(small_jobs):
    for kind in (0, 1):
        (_, _, first, _), (_, _, second, _) = small_jobs[f"shapes {kind}"]
        assert first == sum(SIZES[0])
        assert second == sum(SIZES[0][:-1]) + SIZES[1][-1]


def test_tensors_of_every_kind_are_averaged_and_spread(small_jobs):
    assert small_jobs["exchanges"] == [True, True]


def test_processes_tell_each_other(small_jobs):
    both = ((2**50, 2**50 + 1), (False, True), ["a", "aa"])
    assert small_jobs["agreements"] == [(*both, [0, 1], 0), (*both, [], 0)]


def fails_in_the_second():
    with join_processes("cpu") as processes:
        processes.barrier()
        if processes.rank == 1:
            raise ValueError("the reason")
        while True:
            processes.barrier()


# Either process, and what each is told: tests/training/test_failures.py, where no launcher ends one for the other.
def test_an_error_in_a_process_of_torchrun_ends_all():
    with pytest.raises(ChildFailedError, match="ValueError: the reason"):
        under_torchrun(fails_in_the_second)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_group_of_pytorch_2_6_is_left_by_its_backend(monkeypatch, device):
    class Group:
        """The functions that PyTorch 2.6 has."""

        def _get_backend(self, device):
            return types.SimpleNamespace(abort=lambda: aborted.append(device.type))

    aborted = []
    monkeypatch.setattr(
        processes_module, "distributed", types.SimpleNamespace(group=types.SimpleNamespace(WORLD=Group()))
    )
    processes_module._abort(torch.device(device))
    assert aborted == (["cuda"] if device == "cuda" else [])  # that for the CPU has no such function and does not wait


@pytest.mark.parametrize("frees_safely", [False, True])
def test_a_process_group_of_pytorch_2_6_is_kept_until_the_process_ends(monkeypatch, frees_safely):
    """There, freeing one may wait for a thread that waits for the GIL."""

    class World:
        pass

    if frees_safely:
        World.shutdown = None  # which newer versions have
    held = types.SimpleNamespace(WORLD=World())
    group = weakref.ref(held.WORLD)
    destroyed = types.SimpleNamespace(group=held, destroy_process_group=lambda: delattr(held, "WORLD"))
    monkeypatch.setattr(processes_module, "distributed", destroyed)
    processes_module._leave()
    assert not hasattr(held, "WORLD")
    assert (group() is None) == frees_safely


def test_alone_nothing_is_exchanged():
    alone = Processes(0, 1, torch.device("cpu"))
    values = torch.tensor([1.0, 2.0])
    alone.start_average([values])()
    alone.broadcast_tensors([values])
    assert alone.all_reduce_sum(values).tolist() == [1.0, 2.0]
    assert alone.first
    assert (alone.any(True), alone.any(False)) == (True, False)
    assert (alone.all_gather_number(3), alone.all_gather("x")) == ((3,), ["x"])
    assert alone.gather("x") == ["x"]
    assert alone.broadcast("x") == "x"


@pytest.mark.parametrize("device", ["gpu", "cud", "meta", "cpu:x"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ArgumentError, match="`device` must be cpu, cuda or cuda:N, got"), join_processes(device):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ArgumentError, match=r"`device` must be .*No GPU was found; use cpu"), join_processes("cuda"):
        pass


def test_a_named_gpu_is_for_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = r"`device` must be cpu or cuda for several processes, got 'cuda:1'\. Leave the number out"
    with pytest.raises(ArgumentError, match=words), join_processes("cuda:1"):
        pass


@pytest.mark.parametrize(
    ("device", "settings", "advice"),
    [("cuda:2", {}, ""), ("cuda", {"WORLD_SIZE": "3", "LOCAL_RANK": "2"}, " Start fewer processes.")],
    ids=["named", "one of several"],
)
def test_a_gpu_beyond_those_there_are_is_refused(monkeypatch, device, settings, advice):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError) as refusal, join_processes(device):
        pass
    assert str(refusal.value) == f"`device` must be one of the 2 GPUs here, got 'cuda:2'.{advice}"


def test_kernels_leave_as_many_multiprocessors_free_as_nccl_takes(monkeypatch):
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    on_gpu, on_cpu = (Processes(0, 2, torch.device(kind)) for kind in ("cuda", "cpu"))
    processes_module._limit_nccl()
    assert on_gpu.nccl_multiprocessors == 24
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    processes_module._limit_nccl()
    assert on_gpu.nccl_multiprocessors == 8
    assert on_cpu.nccl_multiprocessors == 0


@pytest.mark.parametrize("given", ["0", "-3", "many", "2.5"])
def test_a_limit_of_nccl_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv("NCCL_MAX_CTAS", given)
    with pytest.raises(ArgumentError, match="`NCCL_MAX_CTAS` must be a number of multiprocessors from 1 on"):
        processes_module._limit_nccl()

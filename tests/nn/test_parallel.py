"""PyTorch's own parallel training, with a model that contains our layers: two processes, one result."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch
from several import COUNT, together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gatewise
from gatewise.training.processes import Processes

T, B, FEATURES, HIDDEN = 7, 4, 24, 64
STEPS = 6  # enough for eager calls on a GPU to be captured and replayed
SECONDS = 90


class Net(nn.Module):
    """Two LSTM layers and a linear map."""

    def __init__(self, layer):
        super().__init__()
        self.lstm = layer(FEATURES, HIDDEN, num_layers=2)
        self.out = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x, **options):
        return self.out(self.lstm(x, **options)[0])


def plain(model, device):
    return model


def averaged(model, device):
    return DistributedDataParallel(model)


def averaged_in_place(model, device):
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def averaged_and_compiled(model, device):
    return torch.compile(DistributedDataParallel(model), backend="aot_eager")


def in_shards(model, device):
    mesh = init_device_mesh(device.type, (COUNT,))
    fully_shard(model.lstm, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_shards_and_accelerated(model, device):
    return gatewise.accelerate(in_shards(model, device), verbose=False)


WAYS = [averaged, averaged_in_place, in_shards]


def trained(processes, way, layer=gatewise.LSTM, lengths=None):
    """Train on the columns of this process; return the losses, and the weights before and after."""
    device = processes.device
    torch.manual_seed(0)
    model = Net(layer)
    start = [weight.detach().numpy().copy() for weight in model.parameters()]
    model = way(model.to(device), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    share = slice(processes.rank * B // processes.count, (processes.rank + 1) * B // processes.count)
    options = {} if lengths is None else {"lengths": torch.tensor(lengths[share], device=device)}
    losses = []
    for step in range(STEPS):
        x = torch.randn(T, B, FEATURES, generator=torch.Generator().manual_seed(step))[:, share].to(device)
        optimizer.zero_grad()
        loss = (model(x, **options) - x.flip(0)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, start, [whole(weight) for weight in model.parameters()]


def whole(weight):
    weight = weight.detach()
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).cpu().numpy().copy()


def distance(ones, others):
    return sum(((one - other).astype(float) ** 2).sum() for one, other in zip(ones, others, strict=True)) ** 0.5


DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def runs(request, tmp_path_factory):
    """The device, and the results of two processes in each kind of training."""
    device = request.param
    if device == "cuda" and torch.cuda.device_count() < COUNT:
        pytest.skip("needs two GPUs")
    jobs = {way.__name__: (trained, {"way": way}) for way in WAYS}
    jobs["accelerated"] = (trained, {"way": in_shards_and_accelerated, "layer": nn.LSTM})
    jobs["theirs"] = (trained, {"way": averaged, "layer": nn.LSTM})
    for way in (averaged, in_shards):
        jobs[f"gru {way.__name__}"] = (trained, {"way": way, "layer": gatewise.GRU})
    jobs["their gru"] = (trained, {"way": averaged, "layer": nn.GRU})
    jobs["unequal"] = (trained, {"way": averaged, "lengths": [7, 3, 1, 5]})
    if not can_shard(device):
        sharding = in_shards, in_shards_and_accelerated
        jobs = {name: job for name, job in jobs.items() if job[1]["way"] not in sharding}
    context = multiprocessing.get_context("spawn") if device == "cuda" else None
    return device, together(tmp_path_factory.mktemp("results"), jobs, device, context, SECONDS)


def can_shard(device):
    """Return whether `fully_shard` runs on the device; PyTorch 2.6 ends it on a CPU with an AttributeError."""
    return device == "cuda" or hasattr(torch.cpu.Stream, "record_event")


def results_of(runs, name):
    device, found = runs
    if not can_shard(device) and name in ("in_shards", "gru in_shards", "accelerated"):
        pytest.skip("fully_shard of PyTorch 2.6 needs a GPU")
    return found[name]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_two_processes_train_what_one_does_with_both_shares(runs, way):
    assert_train_what_one_does(runs[0], *results_of(runs, way.__name__))


# Compiling takes two processes most of the time of all other jobs; one process compiles below.
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.exhaustive), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_two_processes_that_compile_train_what_one_does_with_both_shares(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < COUNT:
        pytest.skip("needs two GPUs")
    context = multiprocessing.get_context("spawn") if device == "cuda" else None
    jobs = {"compiled": (trained, {"way": averaged_and_compiled})}
    assert_train_what_one_does(device, *together(tmp_path, jobs, device, context, SECONDS)["compiled"])


# Compiled models, and models in groups of processes, are tested by themselves.
@pytest.mark.exhaustive
def test_a_compiled_model_in_a_group_of_one_process_trains_what_it_does_alone():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        (losses, _, ours), (alone, _, expected) = (
            trained(Processes(0, 1, torch.device("cpu")), way) for way in (averaged_and_compiled, plain)
        )
    finally:
        torch.distributed.destroy_process_group()
        torch.compiler.reset()
    assert losses == pytest.approx(alone, rel=1e-5)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def assert_train_what_one_does(device, one_of_two, other_of_two):
    (first_losses, start, first), (second_losses, _, second) = one_of_two, other_of_two
    losses, _, alone = trained(Processes(0, 1, torch.device(device, 0)), plain)
    assert all((one == other).all() for one, other in zip(first, second, strict=True)), "weights of both processes"
    # A wrong part of the batch would change the weights as much as training does; rounding does not.
    assert distance(first, alone) < 0.001 * distance(start, alone)
    assert [(one + other) / 2 for one, other in zip(first_losses, second_losses, strict=True)] == pytest.approx(
        losses, rel=1e-4
    )
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["averaged", "accelerated"])
def test_it_trains_what_the_layer_of_torch_does(runs, name):
    (_, start, ours), (_, _, theirs) = results_of(runs, name)[0], results_of(runs, "theirs")[0]
    assert distance(ours, theirs) < 0.001 * distance(start, ours)


@pytest.mark.parametrize("way", [averaged, in_shards], ids=lambda way: way.__name__)
def test_grus_train_what_those_of_torch_do(runs, way):
    (_, start, first), (_, _, second) = results_of(runs, f"gru {way.__name__}")
    assert all((one == other).all() for one, other in zip(first, second, strict=True)), "weights of both processes"
    assert distance(first, results_of(runs, "their gru")[0][2]) < 0.001 * distance(start, first)


def test_lengths_go_through(runs):
    device, found = runs
    lengths = [7, 3, 1, 5]
    _, start, alone = trained(Processes(0, 1, torch.device(device, 0)), plain, lengths=lengths)
    first, second = (each[2] for each in found["unequal"])
    assert all((one == other).all() for one, other in zip(first, second, strict=True))
    assert distance(first, alone) < 0.001 * distance(start, alone)
    assert distance(first, found["averaged"][0][2]) > 0.01 * distance(start, alone), "lengths change the result"

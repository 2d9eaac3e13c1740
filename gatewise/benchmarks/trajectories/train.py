"""Training of a case with one kind of layer, in one process or several."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.backends import cudnn
from torch.multiprocessing.spawn import spawn

from gatewise.benchmarks.trajectories.cases import Case
from gatewise.benchmarks.trajectories.tasks import MODELS, batches

_CLIP = 1.0


def train(case: Case, kind: str, seed: int, steps: int, device: torch.device) -> list[float]:
    """Return the loss of each step; with several processes, that of the first one.

    Args:
        case: The model and how it is trained.
        kind: The kind of the layer, see `trajectories.layers.layer`.
        seed: The seed of weights, dropout and data.
        steps: The number of steps.
        device: The device; with several processes, that of the first.
    """
    if case.processes == 1:
        return _train(case, kind, seed, steps, device)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        arguments = (case, kind, seed, steps, device.type, store, queue)
        spawn(_process, arguments, nprocs=case.processes)
        return queue.get()


def _process(rank: int, case: Case, kind: str, seed: int, steps: int, device: str, store: str, queue) -> None:  # noqa: ANN001
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=store, rank=rank, world_size=case.processes)
    try:
        found = _train(
            case, kind, seed, steps, torch.device(device, rank) if device == "cuda" else torch.device(device), rank
        )
        if rank == 0:
            queue.put(found)
    finally:
        torch.distributed.destroy_process_group()


def _train(case: Case, kind: str, seed: int, steps: int, device: torch.device, rank: int = 0) -> list[float]:
    with _settings(case, device):
        torch.manual_seed(seed)
        model = MODELS[case.task](case, kind).to(device, getattr(torch, case.dtype))
        torch.manual_seed(seed + 1000 * rank)  # for dropout
        wrapped: nn.Module = model
        if case.processes > 1:
            wrapped = nn.parallel.DistributedDataParallel(model, [device] if device.type == "cuda" else None)
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        optimizer = kinds[case.optimizer](model.parameters(), lr=case.rate)
        scaler = torch.amp.GradScaler(device.type, enabled=case.scaled)
        autocast = getattr(torch, case.autocast) if case.autocast else torch.bfloat16
        state, losses = None, []
        for batch in batches(case, seed + 1000 * rank, device):
            optimizer.zero_grad()
            with torch.autocast(device.type, autocast, enabled=bool(case.autocast)):
                loss, state = wrapped(batch, state)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
            if len(losses) == steps:
                break
        return torch.stack(losses).tolist()


@contextlib.contextmanager
def _settings(case: Case, device: torch.device) -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = cudnn.allow_tf32, products.allow_tf32
    cudnn.allow_tf32 = products.allow_tf32 = case.tf32
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    finally:
        cudnn.allow_tf32, products.allow_tf32 = before

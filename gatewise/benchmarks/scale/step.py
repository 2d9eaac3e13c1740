"""A training step on several processes, as `gatewise train lm` takes it or as it is written in plain PyTorch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gatewise.benchmarks import rivals
from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.scale.ways import Way
from gatewise.contract.data_parallel import for_data_parallel
from gatewise.data import Window
from gatewise.models import LanguageModel
from gatewise.training import TrainingOptions
from gatewise.training.graph import ReplayedStep, TrainBatch, cuda_graphs, refusal
from gatewise.training.optimizers import build_optimizer
from gatewise.training.processes import ALONE, Processes
from gatewise.training.step import MeanLoss, Step


class _PlainLoss(nn.Module):
    """The mean loss of the language model as it is usually written."""

    def __init__(self, model: rivals.LanguageModel, overlapped: bool) -> None:
        super().__init__()
        self.model = model
        self.overlapped = overlapped

    def forward(self, batch: Window, state: Any) -> tuple[Tensor, Any]:
        with for_data_parallel() if self.overlapped else contextlib.nullcontext():
            hidden, state = self.model(batch.inputs, state)
        return functional.cross_entropy(self.model.decoder(hidden).float(), batch.targets.flatten()), state


@contextlib.contextmanager
def training_step(
    way: Way,
    case: LanguageModelCase,
    start: Sequence[Tensor],
    precision: Precision,
    processes: Processes,
    *,
    dropout: float,
) -> Iterator[tuple[TrainBatch, nn.Module]]:
    """Yield a function that trains on a batch, from (batch, state) to (mean loss, state), and its model.

    The optimizer is SGD; the learning rate and the norm for clipping are those of a loss that is summed over time, as
    usual for this model. The step of `gatewise train lm` is captured as a CUDA graph where that is possible, as there.

    Args:
        way: The way.
        case: The sizes of the model and of the batch of each process.
        start: The initial weights, in the order of `rivals.LanguageModel.parameters()`, on the device.
        precision: The precision.
        processes: The processes.
        dropout: The dropout probability.
    """
    rate, clip = float(case.time), case.clip_norm / case.time
    vocabulary, device = len(start[0]), processes.device
    loss: nn.Module
    with torch.device(device):
        if way.layer is None:
            model: nn.Module = LanguageModel(
                vocabulary,
                case.hidden_size,
                case.hidden_size,
                case.num_layers,
                dropout=dropout,
                embedding_dropout=dropout,
                layer_dropout=dropout,
            )
            loss = MeanLoss(model)
        else:
            model = plain = rivals.LanguageModel(case, vocabulary, rivals.Way(way.name, way.layer), dropout)
            loss = _PlainLoss(plain, way.overlapped)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
    model.train()
    if way.parallel and processes.count > 1:
        loss = _parallel(loss, way, device)
    if way.sharded and processes.count > 1:
        for part in (*model.children(), model):
            fully_shard(part)
    if way.layer is not None:
        yield _plain_step(loss, rate, clip, precision, device), model
        return
    options = TrainingOptions(optimizer="sgd", learning_rate=rate, momentum=0.0)
    step = Step(
        loss,
        build_optimizer(model.parameters(), options),
        clip,
        "bfloat16" if precision.autocast else "float32",
        device,
        processes=ALONE if way.parallel else processes,
        exchange_bfloat16=way.bfloat16,
        exchange_rows=way.rows,
    )
    # DistributedDataParallel can be captured only after eleven steps, on a stream of its own.
    if refusal(True, processes) or way.parallel:
        yield step, model
        return
    weights = list(model.parameters())
    with contextlib.closing(
        ReplayedStep(step, cuda_graphs(processes), lambda sentence: None, weights, processes, step.expect)
    ) as replayed:
        yield replayed, model


def in_turn(step: TrainBatch, batches: Sequence[Window], case: LanguageModelCase, start: Sequence[Tensor]) -> Any:
    """Return a function that trains on the next batch, with the state of the one before, and returns the loss."""
    zeros = start[0].new_zeros(case.num_layers, case.batch, case.hidden_size)
    state: Any = (zeros, zeros)
    following = itertools.cycle(batches)

    def train() -> Tensor:
        nonlocal state
        loss, state = step(next(following), state)
        return loss

    return train


def _parallel(loss: nn.Module, way: Way, device: torch.device) -> nn.Module:
    devices = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        loss, device_ids=devices, static_graph=way.static, gradient_as_bucket_view=way.static
    )
    if way.bfloat16:
        # PyTorch refuses the hook by its name without NCCL, but gloo can run it.
        wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return wrapped


def _plain_step(loss_of: nn.Module, rate: float, clip: float, precision: Precision, device: torch.device) -> TrainBatch:
    weights = list(loss_of.parameters())
    # PyTorch's fused SGD takes no weights that are divided among processes.
    fused = device.type == "cuda" and not any(isinstance(weight, DTensor) for weight in weights)
    optimizer = torch.optim.SGD(weights, lr=rate, fused=fused, foreach=not fused)

    def step(batch: Window, state: Any) -> tuple[Tensor, Any]:
        optimizer.zero_grad(set_to_none=True)
        with precision.autocasting(device):
            loss, (h, c) = loss_of(batch, state)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, clip, foreach=True)
        optimizer.step()
        return loss.detach(), (h.detach(), c.detach())

    return step

"""The parts that training steps of all models share: the exchange of PyTorch, the CUDA graph, batches in turn."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from gatewise.benchmarks.scale.ways import Way
from gatewise.training.graph import ReplayedStep, TrainBatch, cuda_graphs, refusal
from gatewise.training.processes import Processes
from gatewise.training.step import Step


def in_turn(step: TrainBatch, batches: Sequence[Any], state: Any) -> Callable[[], Tensor]:
    """Return a function that trains on the next batch, with the state of the one before, and returns the loss.

    Args:
        step: A function that trains on a batch.
        batches: The batches, used in turn.
        state: The state before the first batch.
    """
    following = itertools.cycle(batches)

    def train() -> Tensor:
        nonlocal state
        loss, state = step(next(following), state)
        return loss

    return train


def data_parallel(loss: nn.Module, way: Way, device: torch.device) -> nn.Module:
    """Return a module in `DistributedDataParallel`, with the options of a way."""
    devices = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        loss, device_ids=devices, static_graph=way.static, gradient_as_bucket_view=way.static
    )
    if way.bfloat16:
        # PyTorch refuses the hook by its name without NCCL, but gloo can run it.
        wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return wrapped


@contextlib.contextmanager
def replayed_if_possible(step: Step, model: nn.Module, processes: Processes) -> Iterator[TrainBatch]:
    """Yield a step as the training commands run it: on GPUs captured and replayed as a CUDA graph.

    Args:
        step: The step, which exchanges gradients itself.
        model: The model that it trains.
        processes: The processes.
    """
    if refusal(True, processes):
        yield step
        return
    weights = list(model.parameters())
    with contextlib.closing(
        ReplayedStep(step, cuda_graphs(processes), lambda sentence: None, weights, processes, step.expect)
    ) as replayed:
        yield replayed

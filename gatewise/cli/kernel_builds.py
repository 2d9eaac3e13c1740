"""Compiling the kernels of a training run before its batches need them, several at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.contract.triton_kernels import TritonLaunch
from gatewise.models import table_gradient
from gatewise.nn import LSTM
from gatewise.selection import explain
from gatewise.training.precision import arithmetic
from gatewise.training.processes import Processes

if TYPE_CHECKING:
    from gatewise.kernels.persistent.launches.builds import Compilation

Builds = Callable[[Device], "Iterable[Compilation]"]
"""A function that returns the kernels that a run launches on a device, the most urgent first."""


class LayerCall(NamedTuple):
    """A call of a layer.

    Attributes:
        layer: The layer.
        shape: The shape of its input, (T, B, I).
        lengths: Whether the sequences differ in length.
        training: Whether the call is one of training, rather than of an evaluation.
    """

    layer: LSTM
    shape: tuple[int, int, int]
    lengths: bool = False
    training: bool = True


@contextlib.contextmanager
def kernels_ahead(builds: Builds, device: torch.device) -> Iterator[None]:
    """Compile what a run launches in other threads while the context runs; on a CPU, do nothing.

    Compiling one kernel takes up to a second, and a translation model has kernels for every shape of its batches. An
    error of a compilation is raised where the kernel is launched, an error of finding the kernels here.

    Args:
        builds: The function that returns the kernels.
        device: The device of the model.
    """
    if device.type != "cuda":
        yield
        return
    # Imported with the toolchain for CUDA.
    from gatewise.kernels.persistent.launches.builds import building

    with building(builds(Device.probe(device)), device=device):
        yield


def layer_builds(calls: Iterable[LayerCall], precision: str, device: Device) -> Iterator[Compilation]:
    """Yield the kernels that calls of layers launch.

    Args:
        calls: The calls, the most urgent first.
        precision: The precision, as in `TrainingOptions`.
        device: The device.
    """
    # Imported with the toolchain for CUDA.
    from gatewise.kernels.persistent.launches.builds import copies_of, launches_of

    for call in dict.fromkeys(calls):
        decision = decided(call, precision, device)
        if decision.chosen == "persistent":
            yield from launches_of(decision.problem, device)
            yield from copies_of(decision.problem, device)


def lookup_builds(tables: Iterable[nn.Embedding], processes: Processes, device: Device) -> Iterator[TritonLaunch]:
    """Yield the kernels that add up the gradients of embeddings, which several processes launch.

    Args:
        tables: The embeddings.
        processes: The processes of the distributed training.
        device: The device.
    """
    if processes.count > 1 and device.triton:
        for table in dict.fromkeys(tables):
            yield from table_gradient.launches(table.embedding_dim, table.weight.dtype)


def decided(call: LayerCall, precision: str, device: Device) -> Decision:
    """Return the decision about a call, as training and its evaluations make it."""
    layer, shape, lengths, training = call
    half = torch.bfloat16 if precision == "bfloat16" else None
    with arithmetic(precision):
        return explain(layer, shape, lengths=lengths or None, dtype=half, training=training, device=device)

"""Compiling the kernels of a training run before its batches need them, several at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.nn import LSTM
from gatewise.selection import explain
from gatewise.training.precision import arithmetic


class LayerCall(NamedTuple):
    """A call of a layer in training.

    Attributes:
        layer: The layer.
        shape: The shape of its input, (T, B, I).
        lengths: Whether the sequences differ in length.
    """

    layer: LSTM
    shape: tuple[int, int, int]
    lengths: bool = False


@contextlib.contextmanager
def kernels_ahead(calls: Iterable[LayerCall], precision: str, device: torch.device) -> Iterator[None]:
    """Compile what the calls launch in other threads while the context runs; on a CPU, do nothing.

    Compiling one kernel takes seconds, and a translation model has kernels for every shape of its batches.

    Args:
        calls: The calls, the most urgent first.
        precision: The precision, as in `TrainingOptions`.
        device: The device of the model.
    """
    if device.type != "cuda":
        yield
        return
    # Imported with the toolchain for CUDA.
    from gatewise.kernels.persistent.launches.builds import building, launches_of

    decisions = decided(calls, precision, Device.probe(device))
    found = (each for each in decisions if each.chosen == "persistent")
    with building(launch for each in found for launch in launches_of(each.problem, each.device)):
        yield


def decided(calls: Iterable[LayerCall], precision: str, device: Device) -> list[Decision]:
    """Return the decisions about the calls, as training makes them, each once."""
    half = torch.bfloat16 if precision == "bfloat16" else None
    with arithmetic(precision):
        return [
            explain(call.layer, call.shape, lengths=call.lengths or None, dtype=half, training=True, device=device)
            for call in dict.fromkeys(calls)
        ]

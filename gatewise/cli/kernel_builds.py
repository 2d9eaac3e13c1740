"""Compiling the kernels of a training run before its batches need them, several at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from gatewise.contract.decision import Decision
from gatewise.contract.device import Device
from gatewise.models import Seq2Seq
from gatewise.nn import LSTM
from gatewise.planning import Shape
from gatewise.planning.translation.decoder import sizes_of
from gatewise.planning.translation.setting import Setting
from gatewise.selection import explain
from gatewise.training.precision import arithmetic

if TYPE_CHECKING:
    from gatewise.kernels.persistent.launches.builds import Compilation


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


class DecoderCalls(NamedTuple):
    """The calls of a decoder with input feeding in training.

    Attributes:
        model: The model.
        shapes: The shapes of the batches, as (padded length, pairs).
    """

    model: Seq2Seq
    shapes: Sequence[tuple[int, int]]


@contextlib.contextmanager
def kernels_ahead(
    calls: Iterable[LayerCall], precision: str, device: torch.device, decoder: DecoderCalls | None = None
) -> Iterator[None]:
    """Compile what the calls launch in other threads while the context runs; on a CPU, do nothing.

    Compiling one kernel takes seconds, and a translation model has kernels for every shape of its batches.

    Args:
        calls: The calls, the most urgent first.
        precision: The precision, as in `TrainingOptions`.
        device: The device of the model.
        decoder: The model and the batches of a decoder with input feeding; None if there is none.
    """
    if device.type != "cuda":
        yield
        return
    # Imported with the toolchain for CUDA.
    from gatewise.kernels.persistent.launches.builds import building, launches_of

    numbers = Device.probe(device)
    needed: list[Compilation] = [] if decoder is None else decoder_compilations(decoder, precision, numbers)
    for decision in decided(calls, precision, numbers):
        needed += launches_of(decision.problem, numbers) if decision.chosen == "persistent" else []
    with building(needed):
        yield


def decoder_compilations(calls: DecoderCalls, precision: str, device: Device) -> list[Compilation]:
    """Return the kernels that a decoder with input feeding compiles for its batches."""
    # Imported with the toolchain for CUDA.
    from gatewise.feeding.builds import compilations

    found: list[Compilation] = []
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    with arithmetic(precision):
        for steps, rows in calls.shapes:
            setting = Setting(calls.model, Shape(steps, steps, rows), dtype, device)
            problem = sizes_of(setting).replace(attention_kernel=calls.model.attention.kernel)
            found += compilations(problem, device)
    return found


def decided(calls: Iterable[LayerCall], precision: str, device: Device) -> list[Decision]:
    """Return the decisions about the calls, as training and its evaluations make them, each once."""
    half = torch.bfloat16 if precision == "bfloat16" else None
    with arithmetic(precision):
        return [
            explain(layer, shape, lengths=lengths or None, dtype=half, training=training, device=device)
            for layer, shape, lengths, training in dict.fromkeys(calls)
        ]

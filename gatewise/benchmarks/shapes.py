"""Shapes of calls spread over what people compute: drawn at random, or spread evenly so that few say much."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from gatewise.cells import GRU, LSTM
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.selection import predicted
from gatewise.selection.points import PRECISIONS

T = TypeVar("T")

_DIMENSIONS = 11
_ALIGNED = (64, 64, 128, 32, 8, 8, 2, 1)  # what hidden sizes are multiples of
_LAYERS = (1, 1, 1, 1, 1, 2, 2, 2, 3, 4)
_LONGEST = 15e-3  # seconds of the fastest kernel, by prediction
_MOST_STATES = 6e7  # T * B * H * L * D, so that every kernel has memory


def drawn(seed: int, device: Device, *, training: bool | None = None) -> Iterator[Problem]:
    """Yield problems drawn at random without end, in a CUDA graph; the same for a seed and a device.

    Args:
        seed: The seed.
        device: The device; problems that take long on it are left out.
        training: Whether all are training calls, or none; None for both kinds.
    """
    generator = random.Random(seed)
    while True:
        yield from _kept([[generator.random() for _ in range(_DIMENSIONS)]], device, training)


def of_one_step(seed: int, *, many: bool = False, training: bool = False) -> Iterator[Problem]:
    """Yield calls of one step, by LSTMs and GRUs, drawn at random without end.

    Args:
        seed: The seed.
        many: Whether the calls have 9 to 64 sequences, in 16-bit dtypes with sizes that are multiples of 8; otherwise
            they have 1 to 8, in all precisions and with sizes of any kind.
        training: Whether the calls need gradients.
    """
    generator = random.Random(seed)
    halves = [each for each in PRECISIONS.values() if each[0].itemsize == 2]
    while True:
        multiple = generator.choice(_ALIGNED[:6] if many else _ALIGNED)
        hidden = min(2048, max(multiple, round(_between(32, 2048, generator.random()) / multiple) * multiple))
        dtype, tf32 = generator.choice(halves if many else [*PRECISIONS.values()])
        few = 1, 1, 1, 2, 3, 4, 5, 6, 7, 8
        each = 8 if many else 4
        yield Problem(
            time=1,
            batch=round(_between(9, 64, generator.random())) if many else generator.choice(few),
            input_size=generator.choice((hidden, hidden, round(_between(16, 2048, generator.random()) / each) * each)),
            hidden_size=hidden,
            num_layers=generator.choice((1, 1, 2, 3)),
            dtype=dtype,
            needs_grad=training,
            allow_tf32=tf32,
            captured=True,
            announced=True,
            cell=generator.choice((LSTM(), GRU())),
        )


def designed(device: Device) -> Iterator[Problem]:
    """Yield problems of a Sobol sequence without end: however many are taken, they are spread evenly.

    The layers are LSTMs; on a CPU also GRUs, for which PyTorch has other code there.
    """
    by_cell = device.kind == "cpu"
    engine = torch.quasirandom.SobolEngine(_DIMENSIONS + by_cell, scramble=True, seed=0)
    while True:
        yield from _kept(engine.draw(16, dtype=torch.float64).tolist(), device, None)


def precisions_of(device: Device) -> tuple[str, ...]:
    """Return the names of the precisions that calls on a device are measured in."""
    return ("fp32", "bf16") if device.kind == "cpu" else tuple(PRECISIONS)


def _kept(places: Sequence[Sequence[float]], device: Device, training: bool | None) -> Iterator[Problem]:
    for place in places:
        problem = _problem(place, device, training)
        states = problem.time * problem.batch * problem.hidden_size * problem.num_layers * problem.num_directions
        times = [verdict.seconds for verdict in predicted(problem, device).verdicts if verdict.seconds is not None]
        if states <= _MOST_STATES and min(times) <= _LONGEST:
            yield problem


def _problem(place: Sequence[float], device: Device, training: bool | None) -> Problem:
    of_time, of_batch, of_hidden, aligned, of_input, layers, directions, precision, phase, kind, single, *cell = place
    dtype, tf32 = PRECISIONS[_pick(precisions_of(device), precision)]
    time = 1 if single < 0.06 else round(_between(4, 1100, of_time))
    batch = 1 if single > 0.88 else round(_between(1, 512, of_batch))
    if batch > 8 and aligned < 0.6:
        batch = round(batch / 8) * 8
    multiple = _pick(_ALIGNED, aligned)
    hidden = min(2048, max(multiple, round(_between(24, 2048, of_hidden) / multiple) * multiple))
    features = hidden if of_input < 0.5 else round(_between(16, 2048, 2 * of_input - 1) / 4) * 4
    needs_grad = phase < 0.72 if training is None else training
    on_gpu = device.kind == "cuda"
    ragged = kind > 0.93 and time > 8 and batch > 1
    return Problem(
        time=time,
        batch=batch,
        input_size=features,
        hidden_size=hidden,
        num_layers=_pick(_LAYERS, layers),
        bidirectional=directions > 0.75,
        dtype=dtype,
        layout=(Layout.DEVICE_LENGTHS if on_gpu else Layout.HOST_LENGTHS) if ragged else Layout.DENSE,
        needs_grad=needs_grad,
        allow_tf32=tf32,
        lean=needs_grad and kind < 0.08,
        captured=on_gpu,
        announced=on_gpu,
        cell=_pick((LSTM(), GRU()), cell[0]) if cell else LSTM(),
    )


def _between(low: float, high: float, share: float) -> float:
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def _pick(values: Sequence[T], share: float) -> T:
    return values[min(int(share * len(values)), len(values) - 1)]

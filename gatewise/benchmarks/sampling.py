"""The samples of several functions that compute the same thing on one device, taken in turn as in a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from gatewise.selection.timing import Timing, sample_in_turn, time_callable

Key = TypeVar("Key")


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of samples.

    Attributes:
        device: The device.
        seconds: The time in seconds after which sampling of a measured quantity stops.
        least: The smallest number of samples of each quantity, however long they take.
        most: The largest number of samples of each quantity, however short they are.
        warmups: The number of warm-up calls of each quantity before the number of calls per sample is determined.
        rounds: The number of samples of each quantity, in turn, that are discarded on a GPU before the first one that
            counts. After them, the allocator returns the same addresses in every call, as in a training loop, so that
            calls are replayed as CUDA graphs.
        leads: The largest number of untimed calls right before a sample of several calls: the first calls after those
            of another side find memory and caches in the state that those left, unlike calls in a training loop.
        sample: The time of a sample in seconds, with as many calls as fit and at least one. Nothing synchronises
            between its calls, as in a training loop, so that the CPU's work for one call overlaps with the device's
            work for the previous one.
    """

    device: torch.device
    seconds: float
    least: int
    most: int = 50
    warmups: int = 2
    rounds: int = 3
    leads: int = 3
    sample: float = 0.01


def sampled(functions: Mapping[Key, Callable[[], object]], settings: Sampling) -> dict[Key, Timing]:
    """Return the times of functions, sampled in turn."""
    if not functions:
        return {}
    keys = {str(number): key for number, key in enumerate(functions)}
    named = {name: functions[key] for name, key in keys.items()}
    samples: dict[str, list[float]] = {name: [] for name in keys}
    last = list(keys)[-1]
    calls = {name: _calls(function, settings) for name, function in named.items()}
    for _ in range(settings.rounds if settings.device.type == "cuda" else 0):
        for name, function in named.items():
            for _ in range(calls[name]):
                function()
    began = time.perf_counter()
    for name, seconds in sample_in_turn(
        named,
        device=settings.device,
        runs=settings.most,
        warmups=0,
        calls=calls,
        leads={name: min(settings.leads, count) if count > 1 else 0 for name, count in calls.items()},
    ):
        samples[name].append(seconds)
        spent = time.perf_counter() - began
        if name == last and len(samples[name]) >= settings.least and spent >= settings.seconds * len(keys):
            break
    return {keys[name]: short_timing(Timing.of(values)) for name, values in samples.items()}


def _calls(function: Callable[[], object], settings: Sampling) -> int:
    # Several runs, because one of them may capture a CUDA graph.
    once = time_callable(function, device=settings.device, runs=3, warmups=settings.warmups, calls=1).median
    return max(1, round(settings.sample / once))


def short(value: float) -> float:
    """Return a value with five digits; further ones would be more than the measurement is precise."""
    return float(f"{value:.5g}")


def finite(value: float) -> float | None:
    """Return a value with five digits, or None if it is infinite or NaN, which JSON does not have."""
    return short(value) if math.isfinite(value) else None


def short_timing(timing: Timing) -> Timing:
    """Return a time with five digits."""
    return Timing(short(timing.median), short(timing.q20), short(timing.q80), timing.runs)


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a GPU the current device inside the context; graphs are captured on the current device."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield

"""The one stopwatch: autotune and benchmarks read the same clock, so that they cannot disagree.

A sample is `calls` consecutive calls, timed together and divided by their number. The device is idle when a sample
starts and has finished when it ends, so a sample is what a caller waits for: on a GPU the larger of the time the CPU
takes to issue the work and the time the device takes to do it. Several functions are sampled in turn (A B A B ...), so
that a clock that drifts or a machine that gets busy hits all of them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from gatewise.contract.capture import captured_graph
from gatewise.contract.errors import ArgumentError, DeviceError, sentence

_SHORTEST_SAMPLE = 1e-3  # seconds; shorter samples are lost in the cost of reading the clock
_MOST_CALLS = 1000
_LEAST_RUNS = 3

Function = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """How long one call takes, over several samples.

    Attributes:
        median: Seconds a call.
        q20: The 20 % quantile, seconds.
        q80: The 80 % quantile, seconds.
        runs: How many samples there are.
    """

    median: float
    q20: float
    q80: float
    runs: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarise samples, in seconds a call.

        Raises:
            ArgumentError: There is no sample.
        """
        if not samples:
            raise ArgumentError(sentence("samples", "at least one time", "none"))
        q20, median, q80 = (float(value) for value in np.quantile(samples, (0.2, 0.5, 0.8)))
        return cls(median, q20, q80, len(samples))


class Clock(Protocol):
    """What a sample is timed with."""

    def start(self) -> None:
        """Begin a sample, once all earlier work is done."""
        ...

    def stop(self) -> float:
        """Return the seconds since `start`, once all work in between is done."""
        ...


class WallClock:
    """The clock of the CPU, whose work is done when a call returns."""

    def __init__(self) -> None:
        self._began = 0.0

    def start(self) -> None:
        """Begin a sample."""
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since `start`."""
        return time.perf_counter() - self._began


class EventClock:
    """The clock of a CUDA device: two events on the current stream, read when the stream has passed both."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Wait for earlier work, then begin a sample."""
        torch.cuda.synchronize(self._device)
        self._began.record(torch.cuda.current_stream(self._device))

    def stop(self) -> float:
        """Wait for the work since `start` and return its seconds."""
        self._ended.record(torch.cuda.current_stream(self._device))
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) * 1e-3


def clock_for(device: torch.device | str) -> Clock:
    """Return the clock that knows when work on a device is done.

    Raises:
        DeviceError: The device is neither a CPU nor a CUDA device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return WallClock()
    if device.type == "cuda":
        return EventClock(device)
    raise DeviceError(sentence("device", "a CPU or CUDA device", f"'{device}'"))


def time_callable(
    function: Function,
    *,
    device: torch.device | str = "cpu",
    runs: int = 20,
    warmups: int = 3,
    calls: int | None = None,
    budget: float | None = 2.0,
    clock: Clock | None = None,
) -> Timing:
    """Time one function.

    Args:
        function: What is timed; its result is dropped.
        device: Where it works.
        runs: Samples wanted.
        warmups: Calls before the first sample, not timed.
        calls: Calls a sample; None for as many as last a millisecond.
        budget: Seconds after which no further sample begins once there are three; None for all `runs`.
        clock: What to time with; None for the device's own clock.

    Returns:
        Median and 20 and 80 % quantiles, in seconds a call.
    """
    timings = time_side_by_side(
        {"": function}, device=device, runs=runs, warmups=warmups, calls=calls, budget=budget, clock=clock
    )
    return timings[""]


def time_side_by_side(
    functions: Mapping[str, Function],
    *,
    device: torch.device | str = "cpu",
    runs: int = 20,
    warmups: int = 3,
    calls: int | None = None,
    budget: float | None = None,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Time several functions in turn; arguments as in `time_callable`, the budget for all of them together.

    Example:
        >>> timings = time_side_by_side({"sum": lambda: sum(range(99)), "len": lambda: len(range(99))}, runs=3)
        >>> sorted(timings), timings["sum"].runs
        (['len', 'sum'], 3)
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for name, seconds in sample_in_turn(
        functions, device=device, runs=runs, warmups=warmups, calls=calls, budget=budget, clock=clock
    ):
        samples[name].append(seconds)
    return {name: Timing.of(values) for name, values in samples.items()}


def sample_in_turn(
    functions: Mapping[str, Function],
    *,
    device: torch.device | str = "cpu",
    runs: int = 20,
    warmups: int = 3,
    calls: int | Mapping[str, int] | None = None,
    leads: Mapping[str, int] | None = None,
    budget: float | None = None,
    clock: Clock | None = None,
) -> Iterator[tuple[str, float]]:
    """Yield samples of several functions in turn, for callers that show progress or may be interrupted.

    Every function is warmed up first, in the same order. Arguments as in `time_side_by_side`, and:

    Args:
        functions: What is timed, by name.
        device: Where they work.
        runs: Samples of each.
        warmups: Calls of each before the first sample.
        calls: Calls a sample, of all functions or of each by its name.
        leads: Calls of a function right before each of its samples, not timed, by its name; 0 for those not named. The
            first calls after those of other functions find memory and caches as those left them.
        budget: Seconds of samples after which no further ones begin.
        clock: What to time with.

    Yields:
        The name of a function and the seconds a call of it took.

    Raises:
        ArgumentError: A count is out of its range.
    """
    if runs < 1:
        raise ArgumentError(sentence("runs", "at least 1", runs))
    if warmups < 0:
        raise ArgumentError(sentence("warmups", "at least 0", warmups))
    counts = calls.values() if isinstance(calls, Mapping) else () if calls is None else (calls,)
    if any(count < 1 for count in counts):
        raise ArgumentError(sentence("calls", "at least 1, or None", calls))
    clock = clock or clock_for(device)
    calls_of = {}
    for name, function in functions.items():
        for _ in range(warmups):
            function()
        given = calls[name] if isinstance(calls, Mapping) else calls
        calls_of[name] = given or _enough_calls(_sample(function, 1, clock))
    spent = 0.0
    for run in range(runs):
        if budget is not None and run >= _LEAST_RUNS and spent >= budget:
            return
        for name, function in functions.items():
            for _ in range((leads or {}).get(name, 0)):
                function()
            seconds = _sample(function, calls_of[name], clock)
            spent += seconds * calls_of[name]
            yield name, seconds


def captured(function: Function, *, warmups: int = 3) -> Callable[[], None]:
    """Capture a function's CUDA work in a graph and return what replays it.

    The function must not wait for the GPU, and must read and write the same tensors at every call. Gradients that it
    accumulates must exist before, or be set to None before, so that the graph makes them in its own memory.

    Args:
        function: What is captured; it is called `warmups` times on a side stream first.
        warmups: Calls before the capture, so that libraries and caches are ready.

    Returns:
        A function without arguments that replays the graph on the current stream; the graph lives as long as it.

    Raises:
        DeviceError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise DeviceError("A CUDA graph needs a CUDA device, and this machine has none that PyTorch can use.")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):
            function()
    torch.cuda.current_stream().wait_stream(side)
    return captured_graph(function).replay


def peak_memory(function: Function, device: torch.device | str) -> int | None:
    """Return the bytes a call allocates at its peak, beyond what was allocated before it.

    Args:
        function: What is called, once.
        device: Where it works.

    Returns:
        Bytes of PyTorch's CUDA allocator; None on a CPU, where PyTorch does not count them (the function still runs).
    """
    device = torch.device(device)
    if device.type != "cuda":
        function()
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _sample(function: Function, calls: int, clock: Clock) -> float:
    clock.start()
    for _ in range(calls):
        function()
    return clock.stop() / calls


def _enough_calls(seconds: float) -> int:
    return _MOST_CALLS if seconds <= 0.0 else min(_MOST_CALLS, max(1, math.ceil(_SHORTEST_SAMPLE / seconds)))

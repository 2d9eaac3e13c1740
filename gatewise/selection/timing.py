"""Timing of functions, for the policy "measure" and for benchmarks alike.

A sample is the time of `calls` consecutive calls, divided by their number. The device is idle at the start of a sample
and has finished all work at its end, so a sample is the time that a caller waits: on a GPU, the larger of the CPU's
time to issue the work and the device's time to do it. Several functions are sampled in turn (A B A B ...), so that
changes of the clock rate and of other load affect all of them equally.
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

_SHORTEST_SAMPLE = 1e-3  # seconds; in shorter samples, reading the clock takes a noticeable part
_MOST_CALLS = 1000
_LEAST_RUNS = 3

Function = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The time of one call, from several samples.

    Attributes:
        median: The median, in seconds per call.
        q20: The 20 % quantile, in seconds per call.
        q80: The 80 % quantile, in seconds per call.
        runs: The number of samples.
    """

    median: float
    q20: float
    q80: float
    runs: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Return the quantiles of samples, which are in seconds per call.

        Raises:
            ArgumentError: There are no samples.
        """
        if not samples:
            raise ArgumentError(sentence("samples", "at least one time", "none"))
        q20, median, q80 = (float(value) for value in np.quantile(samples, (0.2, 0.5, 0.8)))
        return cls(median, q20, q80, len(samples))


class Clock(Protocol):
    """The clock that times a sample."""

    def start(self) -> None:
        """Start a sample, after all earlier work has finished."""
        ...

    def stop(self) -> float:
        """Return the seconds since `start`, after all work in between has finished."""
        ...


class WallClock:
    """The clock of the CPU, whose work has finished when a call returns."""

    def __init__(self) -> None:
        self._began = 0.0

    def start(self) -> None:
        """Start a sample."""
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since `start`."""
        return time.perf_counter() - self._began


class EventClock:
    """The clock of a CUDA device: two events on the current stream, read after the stream has passed both."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Wait for earlier work, then start a sample."""
        torch.cuda.synchronize(self._device)
        self._began.record(torch.cuda.current_stream(self._device))

    def stop(self) -> float:
        """Wait for the work since `start`, and return its time in seconds."""
        self._ended.record(torch.cuda.current_stream(self._device))
        self._ended.synchronize()
        return self._began.elapsed_time(self._ended) * 1e-3


def clock_for(device: torch.device | str) -> Clock:
    """Return the clock for a device.

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
        function: The function; its result is ignored.
        device: The device on which the function works.
        runs: The number of samples.
        warmups: The number of warm-up calls before the first sample, which are not timed.
        calls: The number of calls per sample; None for as many as take a millisecond.
        budget: The time in seconds after which no further sample starts, if there are at least three; None for no
            limit.
        clock: The clock; None for the device's own.

    Returns:
        The median and the 20 and 80 % quantiles, in seconds per call.
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
    """Time several functions in turn; the arguments are those of `time_callable`, with one budget for all functions.

    Examples:
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

    The warm-up calls of all functions come first, in the same order.

    Args:
        functions: The functions, by name.
        device: The device on which the functions work.
        runs: The number of samples of each function.
        warmups: The number of warm-up calls of each function before the first sample.
        calls: The number of calls per sample, for all functions or by name; None for as many as take a millisecond.
        leads: The number of untimed calls right before each sample, by the function's name; 0 for other functions. The
            first calls after those of other functions find memory and caches in the state that those left.
        budget: The time of all samples in seconds after which no further ones start; None for no limit.
        clock: The clock; None for the device's own.

    Yields:
        The name of a function, and the seconds per call in one sample of it.

    Raises:
        ArgumentError: A number is out of range.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Replay:
    """The replays of a graph, which read and write what the captured function holds, such as an optimizer's state."""

    graph: torch.cuda.CUDAGraph
    function: Function

    def __call__(self) -> None:
        self.graph.replay()


def captured(function: Function, *, warmups: int = 3) -> Callable[[], None]:
    """Capture a function's work in a CUDA graph, and return a function that replays the graph.

    The function must not synchronise with the GPU, and must read and write the same tensors in every call. Gradients
    that it accumulates must exist before, or must be None, so that they are allocated in the graph's memory.

    Args:
        function: The function; it is first called `warmups` times on a side stream.
        warmups: The number of warm-up calls before the capture, which initialise libraries and caches.

    Returns:
        A function without arguments that replays the graph on the current stream. It keeps the graph alive, and
        `function` with the tensors that it holds.

    Raises:
        DeviceError: This machine has no CUDA device.
    """
    if not torch.cuda.is_available():
        raise DeviceError("A CUDA graph needs a CUDA device, and this machine has none that PyTorch can use.")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):
            function()
    torch.cuda.current_stream().wait_stream(side)
    return _Replay(captured_graph(function), function)


def peak_memory(function: Function, device: torch.device | str) -> int | None:
    """Return the peak of the memory that a call allocates, in bytes.

    Args:
        function: The function, which is called once.
        device: The device on which the function works.

    Returns:
        The bytes of PyTorch's CUDA allocator beyond those allocated before the call; None on a CPU, where PyTorch does
        not count them (the function is called nevertheless).
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

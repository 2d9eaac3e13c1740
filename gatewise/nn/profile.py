"""The operators and GPU kernels of single layer calls in a profile, for the forward and the backward pass."""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

_RANGE = "gatewise.verify call"


class Range:
    """A part of the forward pass in the profile, from `open` to `close`, on one thread."""

    def __init__(self, number: int) -> None:
        self.name = f"{_RANGE} {number}"
        self._marker = record_function(self.name)
        self._first = self._last = 0

    def open(self) -> Self:
        """Begin the range."""
        self._first = _next_node()
        self._marker.__enter__()
        return self

    def close(self) -> None:
        """End the range."""
        self._marker.__exit__(None, None, None)
        self._last = _next_node()

    def made(self, event: FunctionEvent) -> bool:
        """Return whether an event of the backward pass belongs to an autograd node that was created in the range."""
        return self._first < event.sequence_nr < self._last


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    """The names in a profile that belong to one range.

    Attributes:
        forward: The operators and GPU kernels of the forward pass, with their numbers of calls.
        backward: Those of the backward pass; empty if there was none.
    """

    forward: Counter[str]
    backward: Counter[str]


def profiler(on_gpu: bool) -> torch.profiler.profile:
    """Return a profiler that records operators, and GPU kernels if `on_gpu` is True."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    return torch.profiler.profile(activities=activities, acc_events=True)


def read(events: Sequence[FunctionEvent], ranges: Sequence[Range]) -> list[Passes]:
    """Return the names in the profile for each range, in order.

    Args:
        events: The result of `torch.profiler.profile.events()`.
        ranges: The ranges, all of them closed.
    """
    on_cpu = sorted((event for event in events if event.device_type.name == "CPU"), key=_start)
    launches = dict(_launches(events, on_cpu))
    found = []
    for span in ranges:
        forward = [event for event in on_cpu if event.name == span.name]
        threads = {event.thread for event in forward}
        nodes = [event for event in on_cpu if event.fwd_thread in threads and span.made(event)]
        found.append(Passes(_inside(forward, on_cpu, launches), _inside(nodes, on_cpu, launches)))
    return found


def _start(event: FunctionEvent) -> float:
    return event.time_range.start


def _next_node() -> int:
    # Autograd numbers the nodes of each thread consecutively; a new node shows the value of the counter.
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    return node._sequence_nr()


def _inside(
    outer: Sequence[FunctionEvent], on_cpu: Sequence[FunctionEvent], launches: dict[int, list[str]]
) -> Counter[str]:
    names: Counter[str] = Counter()
    counted: set[int] = set()
    for event in outer:
        first = bisect.bisect_left(on_cpu, event.time_range.start, key=_start)
        last = bisect.bisect_right(on_cpu, event.time_range.end, key=_start)
        for index in set(range(first, last)) - counted:
            if on_cpu[index].thread == event.thread:
                names[on_cpu[index].name] += 1
                counted.add(index)
            if index in launches:
                names.update(launches[index])
                counted.add(index)
    return names


def _launches(events: Sequence[FunctionEvent], on_cpu: Sequence[FunctionEvent]) -> Iterator[tuple[int, list[str]]]:
    """Yield the index in `on_cpu` of every call that launched GPU kernels, and the names of these kernels."""
    # A call of the CUDA runtime or driver and the kernels that it launched have the same correlation number. Operators
    # have numbers of their own, which can be equal to these.
    kernels: dict[int, list[str]] = {}
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            kernels.setdefault(event.id, []).append(event.name)
    for index, event in enumerate(on_cpu):
        if event.name.startswith("cu") and event.id in kernels:
            yield index, kernels[event.id]

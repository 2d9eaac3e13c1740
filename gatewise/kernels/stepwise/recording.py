"""Time steps captured as CUDA graphs and replayed by later calls from Python, which saves the CPU time of launches.

A captured step uses static buffers: the states between steps, a copy of the recurrent weights, and an argument struct
(the table), to which every call writes the addresses of its own tensors. The captured launches read their arguments
from the table. Tensors with the length of a sequence are therefore not copied, and a graph can be replayed for any
number of steps and any addresses. Runs of 32, 16, 8, 4, 2 and 1 steps are captured, each when it is first needed. All
graphs are discarded when the buffers must grow; everything else that a graph depends on is part of its key (`key_of`).

A device has up to four recorders, each with its own buffers and graphs. A call takes the recorder that was last used on
its stream, otherwise a new one, otherwise the least recently used one, after its stream has waited for the stream of
that recorder's last call. The call holds the recorder's lock while it issues its work. The buffers have the size of the
largest call so far; they and a cuBLAS workspace stay allocated until `release()`. The tensors that calls get are views
of the buffers, which are kept by place, shape and dtype, and are discarded with the buffers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import driver
from gatewise.kernels.cuda.graphs import CaptureStream, Graphs, product_settings
from gatewise.kernels.stepwise.launch import Backward, Forward, Launch
from gatewise.kernels.stepwise.plan import FEWEST_STEPS, runs_of
from gatewise.kernels.stepwise.product_layout import ProductLayout

_MOST_RECORDERS, _MOST_GRAPHS, _MOST_VIEWS = 4, 64, 256
_ALIGNMENT = 256
_TABLE_BYTES = 512

OneStep = Callable[[Callable[[int], None], int], None]


class Recorder:
    """Captured graphs and the static buffers that they share.

    Args:
        device: The device of the calls.
        stream: The stream on which graphs are captured; no other recorder uses it.

    Attributes:
        lock: A lock that a call holds while it issues its work.
        last_stream: The stream of the last call.
    """

    def __init__(self, device: torch.device, stream: CaptureStream) -> None:
        self.lock = threading.Lock()
        self.last_stream = driver.current_stream(device)
        self._device = device
        self._memory: Tensor | None = None
        self._used = 0
        self._views: dict[tuple[object, ...], Tensor] = {}
        self._graphs = Graphs(_MOST_GRAPHS)
        self._done = torch.cuda.Event()
        self._stream = stream

    def begin(self, needed: int) -> None:
        """Start a call: wait for the last call of another stream, and provide buffers of at least `needed` bytes."""
        stream = torch.cuda.current_stream(self._device)
        if self.last_stream != stream.cuda_stream:
            stream.wait_event(self._done)
            if self._memory is not None:
                self._memory.record_stream(stream)
            self.last_stream = stream.cuda_stream
        needed += _TABLE_BYTES + 8 * _ALIGNMENT
        if self._memory is None or self._memory.numel() < needed:
            self._graphs.clear()
            self._views.clear()
            self._memory = None
            # Later calls outside inference mode write to this tensor, too, so it must not be an inference tensor.
            with torch.inference_mode(False):
                self._memory = torch.empty(needed, dtype=torch.uint8, device=self._device)
        self._used = _TABLE_BYTES

    def end(self) -> None:
        """End a call: record the event that a call on another stream waits for."""
        self._done.record(torch.cuda.current_stream(self._device))

    def new_empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, at the same address in every call of the same sizes."""
        start, bytes_needed = self._used, math.prod(shape) * dtype.itemsize
        self._used += -(-bytes_needed // _ALIGNMENT) * _ALIGNMENT
        place = (start, shape, dtype)
        found = self._views.get(place)
        if found is None:
            assert self._memory is not None  # `begin` comes first
            with torch.inference_mode(False):  # for the same reason as in `begin`
                found = self._memory[start : start + bytes_needed].view(dtype).view(shape)
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[place] = found
        return found

    def play(self, key: Hashable, launch: Launch, arguments: Forward | Backward, one_step: OneStep) -> None:
        """Write a call's arguments to the table and replay its steps; capture graphs that do not exist yet.

        Args:
            key: A key of everything that the captured work depends on.
            launch: The element-wise kernel.
            arguments: The arguments of the kernel.
            one_step: A function that issues one step, given a function that launches the kernel and the number of the
                step.
        """
        assert self._memory is not None  # `begin` comes first
        table = self._memory.data_ptr()
        launch.enter(table, arguments)
        stream = driver.current_stream(self._device)
        for count in runs_of(arguments.time):
            graph = self._recording((key, count), launch, one_step, table, count)
            if graph is not None:
                graph.launch(stream, self._device)
            else:
                _issue(launch, one_step, table, count)

    def _recording(
        self, key: Hashable, launch: Launch, one_step: OneStep, table: int, count: int
    ) -> driver.Graph | None:
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._stream.record(lambda: _issue(launch, one_step, table, count))
            if graph is not None:
                self._graphs.add(key, graph)
        return graph


def _issue(launch: Launch, one_step: OneStep, table: int, count: int) -> None:
    for step in range(count):
        one_step(lambda number: launch.recorded(table, number), step)
    launch.advance(table, count)


def key_of(name: str, problem: Problem, layout: ProductLayout) -> Hashable:
    """Return a key of everything that the captured work of a pass depends on, except for the number of steps."""
    sizes = problem.batch, problem.hidden_size, problem.num_directions
    return name, problem.cell, sizes, problem.dtype, problem.allow_tf32, problem.resets, product_settings(), layout


@contextlib.contextmanager
def recorder(device: torch.device, time: int, needed: int) -> Iterator[Recorder | None]:
    """Provide a recorder with buffers for one call, or None if the call should launch its kernels directly.

    Args:
        device: The device of the call, which must be current.
        time: The number of steps; for few steps, or 0, None is returned.
        needed: The size in bytes of the tensors that the call takes from the recorder.
    """
    if device.type != "cuda" or time < FEWEST_STEPS or torch.cuda.is_current_stream_capturing():
        yield None
        return
    found = _recorders(device.index).lend(torch.cuda.current_stream(device).cuda_stream)
    with found.lock:
        found.begin(needed)
        try:
            yield found
        finally:
            found.end()


def release() -> None:
    """Discard all captured graphs, their buffers and cuBLAS's workspaces; later calls capture new ones."""
    _recorders.cache_clear()
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


class _Recorders:
    """The recorders of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._oldest_first: list[Recorder] = []

    def lend(self, stream: int) -> Recorder:
        """Return the recorder for a call on a stream; the caller must acquire its lock."""
        with self._lock:
            found = next((known for known in self._oldest_first if known.last_stream == stream), None)
            if found is None and len(self._oldest_first) < _MOST_RECORDERS:
                found = Recorder(self._device, _capture_stream(self._device.index, len(self._oldest_first)))
            else:
                found = found or self._oldest_first[0]
                self._oldest_first.remove(found)
            self._oldest_first.append(found)
            return found


@functools.cache
def _recorders(device_index: int) -> _Recorders:
    return _Recorders(torch.device("cuda", device_index))


@functools.cache
def _capture_stream(device_index: int, number: int) -> CaptureStream:
    return CaptureStream(torch.device("cuda", device_index))

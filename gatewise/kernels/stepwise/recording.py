"""Steps recorded once as CUDA graphs and replayed by later calls, so that eager calls do not pay for every launch.

A recording works in memory of its own: the state between steps, a copy of the recurrent weights, and a table in which
each call enters where its own tensors lie. The recorded launches read the table, so nothing of the size of a sequence
is copied, and a recording serves any number of steps and any addresses. What is recorded are runs of 32, 16, 8, 4, 2
and 1 steps, each when it is first needed. All recordings are given up when that memory is replaced by larger memory;
what else they depend on is their key (`key_of`).

A device has up to four recorders. A call takes the one that its stream used last, or a new one, or the one that was
used longest ago; where that was on another stream, its own waits for it on the device. The recorder's lock is held
while the call issues its work. Its memory is that of the largest call it has served, and a workspace of cuBLAS, until
`release()`.
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
from gatewise.kernels.stepwise.form import Form
from gatewise.kernels.stepwise.launch import Backward, Forward, Launch
from gatewise.kernels.stepwise.plan import FEWEST_STEPS, runs_of

_MOST_RECORDERS, _MOST_GRAPHS = 4, 64
_ALIGNMENT = 256
_TABLE_BYTES = 512

OneStep = Callable[[Callable[[int], None], int], None]


class Recorder:
    """Recordings, the memory they share, and the stream they were last replayed on.

    Args:
        device: The device of its calls.
        stream: What makes its recordings, and nobody else's.

    Attributes:
        lock: Held while a call issues its work.
        last_stream: The stream of the last call.
    """

    def __init__(self, device: torch.device, stream: CaptureStream) -> None:
        self.lock = threading.Lock()
        self.last_stream = driver.current_stream(device)
        self._device = device
        self._memory: Tensor | None = None
        self._used = 0
        self._graphs = Graphs(_MOST_GRAPHS)
        self._done = torch.cuda.Event()
        self._stream = stream

    def begin(self, needed: int) -> None:
        """Begin to lay out the memory of a call that needs so many bytes."""
        stream = torch.cuda.current_stream(self._device)
        if self.last_stream != stream.cuda_stream:
            stream.wait_event(self._done)
            if self._memory is not None:
                self._memory.record_stream(stream)
            self.last_stream = stream.cuda_stream
        needed += _TABLE_BYTES + 8 * _ALIGNMENT
        if self._memory is None or self._memory.numel() < needed:
            self._graphs.clear()
            self._memory = None
            # Calls outside of inference mode write to it too.
            with torch.inference_mode(False):
                self._memory = torch.empty(needed, dtype=torch.uint8, device=self._device)
        self._used = _TABLE_BYTES

    def end(self) -> None:
        """Note what the next stream has to wait for."""
        self._done.record(torch.cuda.current_stream(self._device))

    def new_empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor; as `Tensor.new_empty`, but at the same address for the same calls."""
        count = math.prod(shape)
        start, self._used = self._used, self._used + -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        assert self._memory is not None  # `begin` comes first
        return self._memory[start : start + count * dtype.itemsize].view(dtype).view(shape)

    def play(self, key: Hashable, launch: Launch, arguments: Forward | Backward, one_step: OneStep) -> None:
        """Enter a call's arguments and replay its steps.

        Args:
            key: Of everything that the recorded work depends on.
            launch: The element-wise kernel, compiled to read the table.
            arguments: Of the call.
            one_step: Issues a step, given what launches the kernel and the number of the step.
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


def key_of(name: str, problem: Problem, form: Form) -> Hashable:
    """Return everything that a pass's recorded work depends on, but for the number of steps."""
    sizes = problem.batch, problem.hidden_size, problem.num_directions
    return name, sizes, problem.dtype, problem.allow_tf32, product_settings(), form


@contextlib.contextmanager
def recorder(device: torch.device, time: int, needed: int) -> Iterator[Recorder | None]:
    """Lend a recorder with room for a call; None where launches are better issued directly.

    Args:
        device: Where the call works; current.
        time: T; few steps are not worth a recording.
        needed: Bytes that the call lays out in the recorder's memory.
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
    """Give up all recordings, their memory and cuBLAS's workspaces; the next calls record anew."""
    _recorders.cache_clear()
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


class _Recorders:
    """The recorders of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._oldest_first: list[Recorder] = []

    def lend(self, stream: int) -> Recorder:
        """Return the recorder for a call on a stream; the caller takes its lock."""
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

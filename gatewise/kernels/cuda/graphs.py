"""Work recorded as a CUDA graph and launched again: the one engine of all kernels here that replay eager calls.

A training loop asks PyTorch's allocator for the same memory in the same order in every step, and is given the same
addresses. Work that is a function of addresses alone can then be launched as it was recorded, at the CPU time of one
launch: on an H100 the eager training cells of `gatewise bench lstm` take 2.2 times as long without it in bfloat16, 1.8
times in TF32 (`benchmarks/results/recordings.jsonl`). A call whose addresses are new issues its launches one by one.

A recording is the list of its launches with their arguments; it holds no values. It would be stale if anything were
different now that those arguments depend on, and this is how each of them is known:

| what could differ | how it is known |
|---|---|
| where a tensor lies | the addresses of all tensors are the key of a recording |
| what lies there | a recording reads memory when it is launched: other values are other results |
| shapes, strides, dtypes, options | each kind of call has `Replays` of its own, and its tensors have no gaps |
| the order on a stream | the stream is part of the key |
| how PyTorch computes products | its settings are part of the key (`product_settings`) |
| the workspace of cuBLAS | it is in memory that is given to nobody else, one for each stream of callers |
| machine code | it is never unloaded |

Recordings neither allocate nor wait. They are made by the CUDA driver rather than by `torch.cuda.CUDAGraph`, which sets
the random number generator of the device to the state of a capture meanwhile, for all threads, and leaves it there when
a capture fails.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gatewise.contract.errors import GatewiseError
from gatewise.kernels.cuda import driver

_MOST_REMEMBERED = 64
_MOST_STREAMS = 4  # beside the default stream
_FREELY = 8  # recordings that a kind of call may make before each must have been replayed so often, on average
_MOST_FAILURES = 3
_DEFAULT_STREAM = 0

_log = logging.getLogger(__name__)


class Graphs:
    """The recordings that were used last, by key.

    Args:
        most: How many are held; the one that was used longest ago gives way.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_key: OrderedDict[Hashable, driver.Graph] = OrderedDict()

    def get(self, key: Hashable) -> driver.Graph | None:
        """Return the recording of a key, which counts as used; None if there is none."""
        found = self._by_key.get(key)
        if found is not None:
            self._by_key.move_to_end(key)
        return found

    def add(self, key: Hashable, graph: driver.Graph) -> None:
        """Hold a recording."""
        self._by_key[key] = graph
        if len(self._by_key) > self._most:
            self._by_key.popitem(last=False)

    def clear(self) -> None:
        """Give up all recordings."""
        self._by_key.clear()


class Replays:
    """The recorded work of one kind of call.

    Args:
        most_graphs: Recordings held at a time.

    Attributes:
        scratch_bytes: What its calls need besides inputs and outputs, once one has been made.
        recorded: Graphs made.
        replayed: Graphs launched.
    """

    def __init__(self, most_graphs: int) -> None:
        self.scratch_bytes: int | None = None
        self.recorded = 0
        self.replayed = 0
        self._records = most_graphs > 0
        self._failures = 0
        self._lock = threading.Lock()  # calls come from several threads, and a graph serves one at a time
        self._graphs = Graphs(most_graphs)
        self._seen: OrderedDict[Hashable, bool] = OrderedDict()

    def play(
        self,
        settings: tuple[object, ...],
        tensors: Sequence[Tensor | None],
        device: torch.device,
        issue: Callable[[], None],
    ) -> None:
        """Issue work on the current stream, or replay it.

        Args:
            settings: What the work depends on besides its tensors.
            tensors: All that it reads and writes, each without gaps; always as many, in the same order.
            device: Where it works; current.
            issue: Launches the work. It allocates nothing, waits for nothing and launches the same work each time.
        """
        if not self._records or torch.cuda.is_current_stream_capturing():
            issue()
            return
        stream = driver.current_stream(device)
        key = (stream, *settings, *[0 if tensor is None else tensor.data_ptr() for tensor in tensors])
        with self._lock:
            graph = self._graphs.get(key)
            if graph is not None:
                self.replayed += 1
                graph.launch(stream, device)
                return
            comes_back = self._comes_back(key)
        if not (comes_back and self._recorded(key, stream, device, issue)):
            issue()

    def _comes_back(self, key: Hashable) -> bool:
        rarely = self.replayed < _FREELY * (self.recorded - _FREELY)
        if self._failures >= _MOST_FAILURES or rarely:
            return False
        if self._seen.pop(key, False):
            return True
        self._seen[key] = True
        if len(self._seen) > _MOST_REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _recorded(self, key: Hashable, stream: int, device: torch.device, issue: Callable[[], None]) -> bool:
        """Record work and launch it; False if it could not be recorded."""
        capture_stream = capture_streams(device.index).of(stream)
        if capture_stream is None:
            return False
        graph = capture_stream.record(issue)
        with self._lock:
            if graph is None:
                self._failures += 1
                return False
            self.recorded += 1
            self._graphs.add(key, graph)
            graph.launch(stream, device)
        return True


class CaptureStream:
    """A stream on which work is recorded, with a workspace for cuBLAS of its own.

    Recordings go on using the workspace that cuBLAS had when they were made, so they may not run at the same time:
    there is one of these for each stream that recordings are launched on.

    Args:
        device: The device of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.ExternalStream(driver.new_stream(device), device)
        self._pool = torch.cuda.MemPool()  # of the workspace; nobody else is given memory of it

    def record(self, issue: Callable[[], None]) -> driver.Graph | None:
        """Return what a function issues, without doing any of it; None if it cannot be recorded."""
        inference = torch.is_inference_mode_enabled()
        return _recorder().submit(self._record, issue, inference).result()

    def _record(self, issue: Callable[[], None], inference: bool) -> driver.Graph | None:
        driver.ensure_context(self._device.index)
        with (
            torch.inference_mode(inference),
            torch.no_grad(),
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
            torch.cuda.use_mem_pool(self._pool, self._device),
        ):
            # Inside of the blocks: those of PyTorch 2.11 do not give a pool back that is left by an error.
            try:
                torch.cuda.current_blas_handle()  # makes the workspace
                return driver.Graph.recorded(self._stream.cuda_stream, issue)
            except (RuntimeError, GatewiseError) as error:
                _log.info("not recorded: %s", error)
                return None


class CaptureStreams:
    """The capture streams of a device: one for its default stream and each of the first few others.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._by_stream: dict[int, CaptureStream] = {}

    def of(self, stream: int) -> CaptureStream | None:
        """Return what records for a stream; None when there are enough already."""
        with self._lock:
            others = len(self._by_stream.keys() - {_DEFAULT_STREAM})
            if stream not in self._by_stream and (stream == _DEFAULT_STREAM or others < _MOST_STREAMS):
                self._by_stream[stream] = CaptureStream(self._device)
            return self._by_stream.get(stream)


@functools.cache
def capture_streams(device_index: int) -> CaptureStreams:
    """Return the capture streams of a device."""
    return CaptureStreams(torch.device("cuda", device_index))


@functools.cache
def _recorder() -> ThreadPoolExecutor:
    # cuBLAS has a workspace for each thread, too: with one thread for all recordings there is one a stream.
    return ThreadPoolExecutor(1, thread_name_prefix="gatewise-recorder")


def product_settings() -> tuple[object, ...]:
    """Return PyTorch's settings that decide how a library product is computed."""
    return tuple([read() for read in _SETTINGS])


# What `torch.backends.cuda.matmul` and `torch.backends.cuda.preferred_blas_library` read, without their checks.
_SETTINGS = [
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_blas_preferred_backend",
        "_get_deterministic_algorithms",
    )
    if hasattr(torch._C, name)
]

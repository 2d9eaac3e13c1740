"""Capture the launches of a call as a CUDA graph, and replay the graph in later calls with the same addresses.

In every step, a training loop requests the same memory in the same order from PyTorch's allocator and gets the same
addresses. If the launches of a call depend on addresses alone, they can be captured once and replayed, for the CPU time
of a single launch. On an H100, the training cases of `gatewise bench lstm` outside user graphs take 2.2 times as long
without replay in bfloat16, and 1.8 times in TF32 (`benchmarks/results/recordings.jsonl`). A call with new addresses
issues its launches one by one.

A captured graph (a recording) is a list of launches with their arguments; it contains no values of tensors. It would be
stale if anything that the arguments depend on had changed. The following rules out each case:

| possible change | protection |
|---|---|
| the address of a tensor | the addresses of all tensors that a graph has no memory for are part of its key |
| the values of a tensor | a graph reads memory when it is launched |
| shapes, strides, dtypes, options | each kind of call has its own `Replays`, and its tensors are contiguous |
| the order on a stream | the stream is part of the key |
| the arithmetic of PyTorch's matrix products | its settings are part of the key (`product_settings`) |
| the workspaces of cuBLAS and cuBLASLt | they are in a private memory pool, one for each stream of callers |
| machine code | it is never unloaded |

Captured work neither allocates nor synchronizes. Graphs are captured with the CUDA driver API rather than with
`torch.cuda.CUDAGraph`, because the latter puts the random number generator of the device into a capture state
meanwhile, for all threads, and leaves it in that state if the capture fails.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import torch

from gatewise.contract.errors import GatewiseError
from gatewise.kernels.cuda import driver
from gatewise.kernels.cuda.static_tensors import CallTensors, StaticTensors, can_be_static, static_tensors

_MOST_REMEMBERED = 1024  # calls with other addresses, as of a loop over time with one call for each step
_MOST_STREAMS = 4  # in addition to the default stream
_FREELY = 8  # captures of a kind of call that are free
_REPLAYS_PER_CAPTURE = 1  # before each further one, so that loops of n calls are recorded in log2(n) iterations
_MOST_FAILURES = 3
_STATIC_FREELY, _REPLAYS_PER_STATIC_CAPTURE = 4, 16  # the same for graphs with memory of their own
_DEFAULT_STREAM = 0

_log = logging.getLogger(__name__)


Captured = TypeVar("Captured")


class Graphs(Generic[Captured]):
    """A least-recently-used cache of captured graphs, by key.

    Args:
        most: The largest number of graphs.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_key: OrderedDict[Hashable, Captured] = OrderedDict()

    def get(self, key: Hashable) -> Captured | None:
        """Return the graph of a key and mark it as used; None if there is none."""
        found = self._by_key.get(key)
        if found is not None:
            self._by_key.move_to_end(key)
        return found

    def add(self, key: Hashable, graph: Captured) -> None:
        """Add a graph, and discard the least recently used one if there are too many."""
        self._by_key[key] = graph
        if len(self._by_key) > self._most:
            self._by_key.popitem(last=False)

    def clear(self) -> None:
        """Discard all graphs."""
        self._by_key.clear()


class StaticGraph(NamedTuple):
    """A graph with memory of its own in place of the small tensors of the calls that replay it.

    Attributes:
        graph: The graph.
        statics: The memory.
    """

    graph: driver.Graph
    statics: StaticTensors

    def launch(self, tensors: CallTensors, stream: int, device: torch.device) -> None:
        """Launch the graph for a call, between the copies of its small tensors."""
        self.statics.copy_in(tensors)
        self.graph.launch(stream, device)
        self.statics.copy_out(tensors)


class StaticGraphs:
    """The graphs of one kind of call that have memory of their own in place of small tensors.

    Args:
        most: The largest number of graphs.
        patience: The number of calls that are issued, although large tensors stay where they are, before a capture.
    """

    def __init__(self, most: int, patience: int) -> None:
        self._graphs: Graphs[StaticGraph] = Graphs(most)
        self._patience = patience
        self._issued: OrderedDict[Hashable, int] = OrderedDict()
        self._recorded = self._replayed = 0
        self._possible = True

    def get(self, key: Hashable) -> StaticGraph | None:
        """Return the graph of a key, which is replayed then; None if there is none."""
        found = self._graphs.get(key)
        self._replayed += found is not None
        return found

    def is_due(self, key: Hashable) -> bool:
        """Count a call that is not replayed, and return whether there were so many of its key that it is captured."""
        rarely = self._replayed < _REPLAYS_PER_STATIC_CAPTURE * (self._recorded - _STATIC_FREELY)
        if rarely or not self._possible:
            return False
        issued = self._issued[key] = self._issued.pop(key, 0) + 1
        if len(self._issued) > _MOST_REMEMBERED:
            self._issued.popitem(last=False)
        return issued > self._patience

    def add(self, key: Hashable, graph: StaticGraph) -> None:
        """Add a graph that was captured."""
        self._recorded += 1
        self._graphs.add(key, graph)
        self._issued.pop(key, None)

    def memory_for(self, key: Hashable, tensors: CallTensors) -> tuple[StaticTensors, CallTensors] | None:
        """Return memory for a capture, and the tensors there; None if there is none, or calls cannot be captured so."""
        try:
            if can_be_static(tensors):
                return static_tensors(tensors)
            self._possible = False  # all calls of a kind have the same sizes
        except MemoryError as error:
            self._issued.pop(key, None)  # it is tried again later
            _log.info("a call was not captured as a CUDA graph: %s", error)
        except (RuntimeError, GatewiseError) as error:  # the copies cannot be compiled or launched
            self._possible = False
            _log.info("calls are not captured as CUDA graphs with memory of their own: %s", error)
        return None


class Replays:
    """The captured graphs of one kind of call.

    Args:
        most_graphs: The largest number of graphs that are kept; 0 to capture none.
        patience: The number of calls that are not replayed, although large tensors stay where they are, after which a
            graph has memory of its own for small ones.

    Attributes:
        scratch_bytes: The workspace of a call in bytes; None before the first call.
        recorded: The number of graphs that were captured.
        replayed: The number of replays.
    """

    def __init__(self, most_graphs: int, patience: int) -> None:
        self.scratch_bytes: int | None = None
        self.recorded = 0
        self.replayed = 0
        self._records = most_graphs > 0
        self._failures = 0
        self._lock = threading.Lock()  # several threads may call, and a graph must not be launched by two at once
        self._graphs: Graphs[driver.Graph] = Graphs(most_graphs)
        self._seen: OrderedDict[Hashable, bool] = OrderedDict()
        self._static_graphs = StaticGraphs(most_graphs, patience)

    def play(
        self,
        settings: tuple[object, ...],
        tensors: CallTensors,
        device: torch.device,
        issue: Callable[[CallTensors], None],
    ) -> None:
        """Run a call on the current stream: replay its graph, or issue its launches and possibly capture them.

        A call is captured when it occurs for the second time with the same addresses and settings, or, with memory for
        its small tensors, when it has occurred many times with other addresses of these alone.

        Args:
            settings: Everything that the work depends on besides its tensors.
            tensors: All tensors that the work reads or writes.
            device: The device of the work, which must be current.
            issue: The function that launches the work on tensors of these sizes. It must not allocate or synchronize,
                and must launch the same work each time.
        """
        if not self._records or torch.cuda.is_current_stream_capturing():
            issue(tensors)
            return
        stream, (read, written, scratch, _) = driver.current_stream(device), tensors
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*read, *written)]
        key = (stream, *settings, scratch.data_ptr(), *addresses)
        with self._lock:
            graph = self._graphs.get(key)
            if graph is not None:
                self.replayed += 1
                graph.launch(stream, device)
                return
            # Small tensors have no addresses in it, by which devices differ.
            key_of_large = (device.index, stream, *settings, *tensors.without_small())
            static_graph = self._static_graphs.get(key_of_large)
            if static_graph is not None:
                self.replayed += 1
                static_graph.launch(tensors, stream, device)
                return
            is_due, comes_back = self._static_graphs.is_due(key_of_large), self._comes_back(key)
        if is_due and self._recorded_static(key_of_large, tensors, stream, device, issue):
            return
        if comes_back and self._recorded(key, stream, device, lambda: issue(tensors)):
            return
        issue(tensors)

    def _comes_back(self, key: Hashable) -> bool:
        rarely = self.replayed < _REPLAYS_PER_CAPTURE * (self.recorded - _FREELY)
        if self._failures >= _MOST_FAILURES or rarely:
            return False
        if self._seen.pop(key, False):
            return True
        self._seen[key] = True
        if len(self._seen) > _MOST_REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _recorded(self, key: Hashable, stream: int, device: torch.device, issue: Callable[[], None]) -> bool:
        """Capture the work and launch its graph; return False if it cannot be captured."""
        graph = self._captured(stream, device, issue)
        if graph is None:
            return False
        with self._lock:
            self._graphs.add(key, graph)
            graph.launch(stream, device)
        return True

    def _recorded_static(
        self,
        key: Hashable,
        tensors: CallTensors,
        stream: int,
        device: torch.device,
        issue: Callable[[CallTensors], None],
    ) -> bool:
        """Do the same as `_recorded`, with memory of the graph in place of small tensors."""
        if self._failures >= _MOST_FAILURES or capture_streams(device.index).of(stream) is None:
            return False
        with self._lock:
            memory = self._static_graphs.memory_for(key, tensors)
        if memory is None:
            return False
        statics, moved = memory
        graph = self._captured(stream, device, lambda: issue(moved))
        if graph is None:
            return False
        with self._lock:
            static_graph = StaticGraph(graph, statics)
            self._static_graphs.add(key, static_graph)
            static_graph.launch(tensors, stream, device)
        return True

    def _captured(self, stream: int, device: torch.device, issue: Callable[[], None]) -> driver.Graph | None:
        capture_stream = capture_streams(device.index).of(stream)
        if capture_stream is None:
            return None
        graph = capture_stream.record(issue)
        with self._lock:
            if graph is None:
                self._failures += 1
            else:
                self.recorded += 1
        return graph


class CaptureStream:
    """A stream on which work is captured, with its own cuBLAS workspace.

    A graph keeps using the cuBLAS workspace of its capture, so graphs that share a workspace must not run concurrently.
    There is therefore one capture stream for each stream on which graphs are launched.

    Args:
        device: The device of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.ExternalStream(driver.new_stream(device), device)
        self._pool = torch.cuda.MemPool()  # for the workspaces alone

    def record(self, issue: Callable[[], None]) -> driver.Graph | None:
        """Capture the launches that a function issues, without executing them; return None if that is impossible."""
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
            # The error is caught inside the blocks, because `use_mem_pool` of PyTorch 2.11 does not release its pool if
            # an error leaves the block.
            try:
                torch.cuda.current_blas_handle()  # allocates the workspace
                return driver.Graph.recorded(self._stream.cuda_stream, issue)
            except (RuntimeError, GatewiseError) as error:
                _log.info("a call was not captured as a CUDA graph: %s", error)
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
        """Return the capture stream for a stream of a caller; None if the limit is reached."""
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
    # cuBLAS has a workspace for each pair of thread and stream; with one thread for all captures, one for each stream.
    return ThreadPoolExecutor(1, thread_name_prefix="gatewise-recorder")


def product_settings() -> tuple[object, ...]:
    """Return the settings of PyTorch that determine how cuBLAS computes matrix products."""
    return tuple([read() for read in _SETTINGS])


# The functions that `torch.backends.cuda.matmul` and `torch.backends.cuda.preferred_blas_library` call, without checks.
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

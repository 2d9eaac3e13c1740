"""Work recorded as CUDA graphs by the addresses it is for, and issued in one launch when they come back.

A training loop asks PyTorch's allocator for the same memory in the same order in every step, and is given the same
addresses. Work that is a function of addresses alone can then be replayed as it was recorded: the same launches with
the same arguments, at the CPU time of one. A call whose addresses are new issues its launches one by one.

A graph holds no memory but the launches themselves (some ten kilobytes each). Recording is done on a stream of its own
for each stream that calls come from, with a workspace for cuBLAS there.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

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

# What work depends on: its stream, settings, and where its tensors begin, 0 for none.
_Key = tuple[object, ...]


class Replays:
    """The recorded work of one kind of call.

    Args:
        most_graphs: Recordings held at a time; the one that was used longest ago gives way.

    Attributes:
        scratch_bytes: What its calls need besides inputs and outputs, once one has been made.
        recorded: Graphs made.
        replayed: Graphs launched.
    """

    def __init__(self, most_graphs: int) -> None:
        self.scratch_bytes: int | None = None
        self.recorded = 0
        self.replayed = 0
        self._most_graphs = most_graphs
        self._failures = 0
        self._lock = threading.Lock()  # calls come from several threads, and a graph serves one at a time
        self._graphs: OrderedDict[_Key, driver.Graph] = OrderedDict()  # the one that was used last at the end
        self._seen: OrderedDict[_Key, bool] = OrderedDict()

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
        if not self._most_graphs or torch._C._cuda_isCurrentStreamCapturing():
            issue()
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        key = (stream, *settings, *[0 if tensor is None else tensor.data_ptr() for tensor in tensors])
        with self._lock:
            graph = self._graphs.get(key)
            if graph is not None:
                self._graphs.move_to_end(key)
                self.replayed += 1
                graph.launch(stream, device)
                return
            comes_back = self._comes_back(key)
        if not (comes_back and self._recorded(key, stream, device, issue)):
            issue()

    def _comes_back(self, key: _Key) -> bool:
        rarely = self.replayed < _FREELY * (self.recorded - _FREELY)
        if self._failures >= _MOST_FAILURES or rarely:
            return False
        if self._seen.pop(key, False):
            return True
        self._seen[key] = True
        if len(self._seen) > _MOST_REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _recorded(self, key: _Key, stream: int, device: torch.device, issue: Callable[[], None]) -> bool:
        """Record work and launch it; False if it could not be recorded."""
        studio = _studios(device.index).of(stream)
        if studio is None:
            return False
        graph = studio.record(issue)
        with self._lock:
            if graph is None:
                self._failures += 1
                return False
            self.recorded += 1
            self._graphs[key] = graph
            if len(self._graphs) > self._most_graphs:
                self._graphs.popitem(last=False)
            graph.launch(stream, device)
        return True


class _Studio:
    """Where the work of one stream is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.ExternalStream(driver.new_stream(device), device)
        # Recordings go on using the workspace that cuBLAS has on this stream. Nobody else is given memory of this pool.
        self._pool = torch.cuda.MemPool()
        # Never freed: PyTorch 2.11 has aborted a process at its end in which a capture had failed and a pool was freed.
        # It was seen twice, and not when looked for; what it costs is the pool of a process that ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))
        self._lock = threading.Lock()

    def record(self, issue: Callable[[], None]) -> driver.Graph | None:
        """Record what a function issues; None if it cannot be."""
        found: list[driver.Graph | None] = []
        mode = torch.is_inference_mode_enabled()

        def work() -> None:
            driver.ensure_context(self._device.index)
            with torch.inference_mode(mode), torch.no_grad(), torch.cuda.device(self._device):
                found.append(self._recorded(issue))

        # cuBLAS has a workspace for each thread too: threads that end leave theirs to the next.
        with self._lock:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return found[0] if found else None

    def _recorded(self, issue: Callable[[], None]) -> driver.Graph | None:
        try:
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool, self._device):
                torch.cuda.current_blas_handle()  # makes the workspace
                return driver.Graph.recorded(self._stream.cuda_stream, issue)
        except (RuntimeError, GatewiseError) as error:
            _log.info("not recorded: %s", error)
        return None


class _Studios:
    """The studios of a device, one for its default stream and each of the first few others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._by_stream: dict[int, _Studio] = {}

    def of(self, stream: int) -> _Studio | None:
        """Return the studio for a stream; None when there are enough already."""
        with self._lock:
            others = len(self._by_stream.keys() - {_DEFAULT_STREAM})
            if stream not in self._by_stream and (stream == _DEFAULT_STREAM or others < _MOST_STREAMS):
                self._by_stream[stream] = _Studio(self._device)
            return self._by_stream.get(stream)


@functools.cache
def _studios(device_index: int) -> _Studios:
    return _Studios(torch.device("cuda", device_index))


def product_settings() -> tuple[object, ...]:
    """Return PyTorch's settings that decide how a library product is computed."""
    return tuple([read() for read in _SETTINGS])


_SETTINGS = [
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_blas_preferred_backend",
    )
    if hasattr(torch._C, name)
]

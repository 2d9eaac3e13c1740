"""Work recorded as CUDA graphs and issued in one launch when it comes again, at the same addresses or at others.

A training loop asks PyTorch's allocator for the same memory in the same order in every step, and is often given the
same addresses. Work that is a function of addresses alone can then be replayed as it was recorded: the same launches
with the same arguments, at the CPU time of one. Where addresses are new, a recording is changed for them, once two
recordings at different addresses have shown which words of its launches follow which tensor (see `relocation`). Until
then, and where recordings do not show it, launches are issued one by one.

A graph holds no memory but the launches themselves (some ten kilobytes each). Recording is done on a stream of its own
for each stream that calls come from, with a workspace for cuBLAS there.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.errors import GatewiseError
from gatewise.kernels.cuda import driver, relocation

_MOST_REMEMBERED = 64
_MOST_STREAMS = 4  # beside the default stream
_FREELY = 8  # recordings that a kind of call may make before each must have been replayed so often, on average
_MOST_FAILURES = 3
_DEFAULT_STREAM = 0
_OFTEN = 8  # calls, together about as long as a recording takes, after which work is recorded wherever it is
_ALIGNED = 256  # bytes; libraries choose among kernels by the alignment of operands, up to this

_log = logging.getLogger(__name__)


class _Key(NamedTuple):
    """What work depends on; `starts` are the addresses of its tensors, 0 for none."""

    stream: int
    settings: tuple[object, ...]
    starts: tuple[int, ...]


class _Recording(NamedTuple):
    """A graph, what it is for now, and its family."""

    graph: driver.Graph
    starts: tuple[int, ...]
    family: _Family


class _Family:
    """Calls that differ in addresses alone: same settings, alignments, and tensors that begin at one address.

    Attributes:
        calls: How many were not replayed.
        base: Nodes of its first recording and where the tensors lay; None before.
        is_fixed: Whether it is replayed at the addresses of recordings only: they do not show what follows a tensor.
        words: Of each tensor that was seen to move, what follows it.
    """

    def __init__(self, starts: tuple[int, ...], is_fixed: bool) -> None:
        self.calls = 0
        self.base: tuple[list, relocation.Spans] | None = None
        self.is_fixed = is_fixed
        self.words: dict[int, set[relocation.Place]] = {}
        self._first_of_each = [index for index, start in enumerate(starts) if starts.index(start) == index and start]

    def learn(self, graph: driver.Graph, spans: relocation.Spans) -> None:
        """Find out from one more recording what follows the tensors that moved."""
        nodes = graph.nodes if spans.are_apart() else None
        if nodes is None:
            self.is_fixed = True
        elif self.base is None:
            # Other recordings are compared with what this one was; the graph itself may be changed.
            self.base = [node.copy() for node in nodes], spans
        else:
            found = relocation.places(*self.base, nodes, spans.starts)
            if isinstance(found, str):
                _log.info("replayed at the same addresses only: %s", found)
                self.is_fixed, self.words = True, {}
                return
            for index in self.moved(self.base[1].starts, spans.starts):
                self.words.setdefault(index, set())
            for place, index in found.items():
                self.words[index].add(place)

    def moved(self, starts: tuple[int, ...], others: tuple[int, ...]) -> list[int]:
        """Return the numbers of the tensors that lie elsewhere, one of those that begin at one address."""
        return [index for index in self._first_of_each if starts[index] != others[index]]


class Replays:
    """The recorded work of one kind of call.

    Args:
        most_graphs: Recordings held at a time; the one that was used longest ago gives way.
        relocates: Whether recordings are changed for other addresses; otherwise work there is launched.

    Attributes:
        scratch_bytes: What its calls need besides inputs and outputs, once one has been made.
        recorded: Graphs made.
        replayed: Graphs launched.
        relocated: Graphs changed for other addresses before they were launched.
    """

    def __init__(self, most_graphs: int, *, relocates: bool = True) -> None:
        self.scratch_bytes: int | None = None
        self.recorded = 0
        self.replayed = 0
        self.relocated = 0
        self._most_graphs = most_graphs
        self._relocates = relocates
        self._failures = 0
        self._lock = threading.Lock()  # calls come from several threads, and a graph serves one at a time
        self._graphs: OrderedDict[_Key, _Recording] = OrderedDict()  # the one that was used last at the end
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
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
            issue: Launches the work. It allocates nothing, waits for nothing, and depends on addresses in nothing but
                alignment and which are the same.
        """
        if not self._most_graphs or torch._C._cuda_isCurrentStreamCapturing():
            issue()
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        key = _Key(stream, settings, tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors]))
        with self._lock:
            found = self._graphs.get(key)
            if found is not None:
                self._graphs.move_to_end(key)
                self.replayed += 1
                found.graph.launch(stream, device)
                return
            family = self._family(key)
            found = self._relocated(key, family)
            if found is not None:
                self.replayed += 1
                found.graph.launch(stream, device)
                return
            wanted = self._is_to_be_recorded(key, family)
        issue()
        if wanted:
            sizes = tuple([0 if tensor is None else tensor.nbytes for tensor in tensors])
            self._record(key, family, sizes, device, issue)

    def _family(self, key: _Key) -> _Family:
        stream, settings, starts = key
        numbers: dict[int, int] = {}
        which = tuple([numbers.setdefault(start, index) for index, start in enumerate(starts)])
        name = stream, settings, which, tuple([start % _ALIGNED for start in starts])
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = _Family(starts, not self._relocates)
            if len(self._families) > _MOST_REMEMBERED:
                self._families.popitem(last=False)
        return family

    def _relocated(self, key: _Key, family: _Family) -> _Recording | None:
        """Return a recording changed for addresses that are new, where all that follows them is known."""
        if not family.words:
            return None
        # The one that was used longest ago.
        recording = next((each for each in self._graphs.values() if each.family is family), None)
        if recording is None:
            return None
        moved = family.moved(recording.starts, key.starts)
        if any(index not in family.words for index in moved):
            return None
        nodes, changed = recording.graph.nodes or [], set()
        for index in moved:
            distance = key.starts[index] - recording.starts[index]
            for node, word in family.words[index]:
                nodes[node].words[word] += distance
                changed.add(node)
        del self._graphs[key._replace(starts=recording.starts)]
        if not recording.graph.write(changed):
            family.is_fixed, family.words = True, {}
            return None
        self.relocated += 1
        self._graphs[key] = recording = recording._replace(starts=key.starts)
        return recording

    def _is_to_be_recorded(self, key: _Key, family: _Family) -> bool:
        rarely = self.replayed < _FREELY * (self.recorded - _FREELY)
        if self._failures >= _MOST_FAILURES or rarely:
            return False
        if self._seen.pop(key, False):
            return True
        family.calls += 1
        # From the second recording on it becomes known what moves.
        if not family.is_fixed and (family.base is not None or family.calls >= _OFTEN):
            return True
        self._seen[key] = True
        if len(self._seen) > _MOST_REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def _record(
        self, key: _Key, family: _Family, sizes: tuple[int, ...], device: torch.device, issue: Callable[[], None]
    ) -> None:
        studio = _studios(device.index).of(key.stream)
        if studio is None:
            return
        graph = studio.record(issue)
        with self._lock:
            if graph is None:
                self._failures += 1
                return
            if not family.is_fixed:
                family.learn(graph, relocation.Spans(key.starts, sizes))
            self.recorded += 1
            self._graphs[key] = _Recording(graph, key.starts, family)
            if len(self._graphs) > self._most_graphs:
                self._graphs.popitem(last=False)


class _Studio:
    """Where the work of one stream is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.ExternalStream(driver.new_stream(device), device)
        # Recordings go on using the workspace that cuBLAS has on this stream. Nobody else is given memory of this pool.
        self._pool = torch.cuda.MemPool()
        # It lasts as long as the process; given up at its end, it would be an error if a capture was left open.
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

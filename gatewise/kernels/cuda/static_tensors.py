"""Memory of a CUDA graph in place of the small tensors of the calls that replay it.

PyTorch allocates tensors of up to 1 MiB from segments that they share with others. The addresses of those that live
longer than a call, such as the states that a training loop carries from batch to batch, move through these segments and
may not come back for hundreds of calls. A graph that reads and writes such tensors in memory of its own can be replayed
wherever they are: one launch copies them there before the graph, and one launch copies its results from there.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.cuda.scratch import Scratch, bytes_together

_SMALL = 2**20  # bytes; PyTorch allocates larger tensors apart from small ones
_MOST_BYTES = 2**22  # of a graph
_SHARE_OF_ALL = 1 / 256  # of a device's memory, for all graphs: 560 MiB of an H200
_ABSENT, _MOVES = -1, 0  # in place of addresses
_PIECES = 32
_THREADS, _MOST_BLOCKS = 256, 64  # of a piece

Given = TypeVar("Given", bound=Tensor | None)


class CallTensors(NamedTuple):
    """The tensors of a call, always in the same number and order.

    Attributes:
        read: The tensors that the call reads, contiguous; None for those that it does not have.
        written: The tensors that it writes, as `read`.
        scratch: The memory for everything else that it writes and reads.
        neighbours: The number of the first tensors that it reads, such as weights, that the call may combine where they
            share an allocation. Such tensors stay neighbours in the memory of a graph. 0 if it does not matter.
    """

    read: tuple[Tensor | None, ...]
    written: tuple[Tensor | None, ...]
    scratch: Tensor
    neighbours: int = 0

    @property
    def allocations(self) -> tuple[int, ...]:
        """For each of the tensors that may be neighbours, the first one in the same allocation."""
        # PyTorch makes an object of each storage, which calls at known addresses do without.
        starts = [own.untyped_storage().data_ptr() for own in self.read[: self.neighbours] if own is not None]
        return tuple([starts.index(start) for start in starts])

    def without_small(self) -> tuple[int, ...]:
        """Return the key of a graph with memory in place of small tensors.

        The key has the addresses of the large tensors, numbers that tell small tensors from absent ones, and
        `allocations`.
        """
        every = (*self.read, *self.written, self.scratch)
        places = [_ABSENT if own is None else _MOVES if own.nbytes <= _SMALL else own.data_ptr() for own in every]
        return (*places, *self.allocations)

    @property
    def has_neighbours(self) -> bool:
        """Whether it matters that tensors which are read lie in one allocation."""
        allocations = self.allocations
        return len(set(allocations)) < len(allocations)


class StaticTensors:
    """The memory of a graph in place of the small tensors of calls, and the copies to and from there.

    It holds no tensor of a call.

    Args:
        call: The tensors of a call, on the current device.
        moved: The same tensors, the small ones in the memory of the graph, from `in_static_memory`.
    """

    def __init__(self, call: CallTensors, moved: CallTensors) -> None:
        every = (*moved.read, *moved.written, moved.scratch)
        self._memory = [own for own in every if own is not None and _is_small(own)]
        self._before = _Copies(call.read, moved.read)
        self._after = _Copies(moved.written, call.written)

    def copy_in(self, call: CallTensors) -> None:
        """Copy the small tensors that a call reads to the memory of the graph."""
        self._before.copy_from(call.read)

    def copy_out(self, call: CallTensors) -> None:
        """Copy the results in the memory of the graph to the small tensors that a call writes."""
        self._after.copy_to(call.written)


def static_tensors(call: CallTensors) -> tuple[StaticTensors, CallTensors]:
    """Return memory of a graph for a call that `can_be_static`, and the tensors of the call there, for the capture.

    Raises:
        MemoryError: The graphs of the device have as much memory as they may have, or the device has no more.
    """
    device, size = call.scratch.device, size_of(call)
    held = _held_by_graphs(device)
    if sum(list(held.values())) + size > _SHARE_OF_ALL * Device.probe(device).memory_bytes:
        raise MemoryError("the graphs of the device may not have more memory in place of small tensors")
    try:
        moved = in_static_memory(call)
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    statics = StaticTensors(call, moved)
    held[statics] = size
    return statics, moved


@functools.lru_cache(maxsize=64)
def _held_by_graphs(device: torch.device) -> weakref.WeakKeyDictionary[StaticTensors, int]:
    """Return the bytes that each graph of a device has in place of small tensors, as long as it exists."""
    return weakref.WeakKeyDictionary()


def in_static_memory(call: CallTensors) -> CallTensors:
    """Return the tensors of a call with uninitialized ones of the same sizes and strides in place of the small ones."""
    # Calls in and outside of inference mode replay the same graph.
    with torch.inference_mode(False):
        read = _moved_together(call.read) if call.has_neighbours else [_moved(own) for own in call.read]
        written = [_moved(own) for own in call.written]
        return call._replace(read=tuple(read), written=tuple(written), scratch=_moved(call.scratch))


def can_be_static(call: CallTensors) -> bool:
    """Return whether a graph can have memory for the small tensors of a call: they are not too large together."""
    small = [own for own in (*call.read, *call.written) if own is not None and _is_small(own)]
    apart = not call.has_neighbours or not any(map(_overlap, _by_allocation(call.read)))
    return apart and all(map(_is_dense, small)) and size_of(call) <= _MOST_BYTES


def size_of(call: CallTensors) -> int:
    """Return the bytes of the memory of a graph for the small tensors of a call."""
    every = (*call.read, *call.written, call.scratch)
    return bytes_together([own.nbytes for own in every if own is not None and _is_small(own)])


def _is_small(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.nbytes <= _SMALL


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill their memory: those of a batch may be in the order of its rows."""
    return tensor.is_contiguous() or (tensor.dim() > 1 and tensor.transpose(0, 1).is_contiguous())


def _moved(tensor: Given) -> Given:
    """Return memory for a small tensor, in the same order of values, and any other tensor itself."""
    if tensor is None or not _is_small(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _moved_together(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return memory as `_moved` does, for those that lie in one allocation in one piece and in the same order."""
    moved: dict[int, Tensor] = {}
    for parts in _by_allocation(tensors):
        room = torch.empty(bytes_together([own.nbytes for own in parts]), dtype=torch.uint8, device=parts[0].device)
        memory = Scratch(room, room)
        for own in parts:
            place = memory.new_empty(own.numel(), dtype=own.dtype)
            moved[id(own)] = place.as_strided(own.shape, own.stride(), place.storage_offset())
    return [moved[id(own)] if id(own) in moved else _moved(own) for own in tensors]


def _by_allocation(tensors: Sequence[Tensor | None]) -> list[list[Tensor]]:
    """Return the small tensors that share an allocation with others, by allocation and address."""
    found: dict[int, list[Tensor]] = {}
    for own in tensors:
        if own is not None and _is_small(own) and own.numel():
            found.setdefault(own.untyped_storage().data_ptr(), []).append(own)
    return [sorted(parts, key=Tensor.data_ptr) for parts in found.values() if len(parts) > 1]


def _overlap(parts: Sequence[Tensor]) -> bool:
    return any(one.data_ptr() + one.nbytes > other.data_ptr() for one, other in itertools.pairwise(parts))


class _Piece(ctypes.Structure):
    """The struct `Piece` of copies.cu, field by field."""

    _fields_ = [("source", ctypes.c_void_p), ("target", ctypes.c_void_p), ("bytes", ctypes.c_longlong)]


class _Pieces(ctypes.Structure):
    """The struct `Copies` of copies.cu, field by field."""

    _fields_ = [("of", _Piece * _PIECES)]


class _Copies:
    """Copies of the small tensors among others, in as few launches as their number allows.

    Args:
        sources: The tensors that are copied.
        targets: The tensors that they are copied to.
    """

    def __init__(self, sources: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> None:
        found = [
            (place, source, target)
            for place, (source, target) in enumerate(zip(sources, targets, strict=True))
            if source is not None and target is not None and _is_small(source) and source.numel()
        ]
        self._places = [place for place, *_ in found]
        self._pieces: list[_Piece] = []
        self._launches = []
        for first in range(0, len(found), _PIECES):
            part = found[first : first + _PIECES]
            arguments = _Pieces()
            for piece, (_, source, target) in zip(arguments.of, part, strict=False):
                piece.source, piece.target, piece.bytes = source.data_ptr(), target.data_ptr(), source.nbytes
            # Elements of a ctypes array are views of it.
            self._pieces += [arguments.of[number] for number in range(len(part))]
            blocks = max(-(-source.nbytes // (16 * _THREADS)) for _, source, _ in part)
            shape = driver.Shape((min(blocks, _MOST_BLOCKS), len(part), 1), _THREADS, 0, cooperative=False)
            device = part[0][1].device
            self._launches.append(driver.prepared(_code(device), "copy_pieces", shape, arguments, device))

    def copy_from(self, sources: Sequence[Tensor | None]) -> None:
        """Copy from other tensors."""
        for place, piece in zip(self._places, self._pieces, strict=True):
            piece.source = sources[place].data_ptr()  # type: ignore[union-attr]
        self._launch()

    def copy_to(self, targets: Sequence[Tensor | None]) -> None:
        """Copy to other tensors."""
        for place, piece in zip(self._places, self._pieces, strict=True):
            piece.target = targets[place].data_ptr()  # type: ignore[union-attr]
        self._launch()

    def _launch(self) -> None:
        for launch in self._launches:
            launch()


@functools.lru_cache(maxsize=8)
def _code(device: torch.device) -> bytes:
    source = toolchain.SHARED / "copies.cu"
    return toolchain.compile_source(source, Device.probe(device).architecture, {"PIECES": _PIECES})

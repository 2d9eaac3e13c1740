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
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.cuda.scratch import ALIGNMENT, bytes_together

_SMALL = 2**20  # bytes; PyTorch allocates larger tensors apart from small ones
_MOST_BYTES = 2**22  # of a graph
_PIECES = 32
_THREADS, _MOST_BLOCKS = 256, 64  # of a piece

Given = TypeVar("Given", bound=Tensor | None)


class CallTensors(NamedTuple):
    """The tensors of a call, always in the same number and order.

    Attributes:
        read: The tensors that the call reads, contiguous; None for those that it does not have.
        written: The tensors that it writes, as `read`.
        scratch: The memory for everything else that it writes and reads.
    """

    read: tuple[Tensor | None, ...]
    written: tuple[Tensor | None, ...]
    scratch: Tensor

    def without_small(self) -> tuple[int, ...]:
        """Return the addresses of the tensors that a graph has no memory of its own for; 0 for the others."""
        every = (*self.read, *self.written, self.scratch)
        return tuple([0 if own is None or own.nbytes <= _SMALL else own.data_ptr() for own in every])


class StaticTensors:
    """The memory of a graph in place of the small tensors of calls, and the copies to and from there.

    It holds no tensor of a call.

    Args:
        call: The tensors of a call, on the current device.
        moved: The same tensors, the small ones in the memory of the graph, from `in_static_memory`.
    """

    def __init__(self, call: CallTensors, moved: CallTensors) -> None:
        self._memory = [
            own for own in (*moved.read, *moved.written, moved.scratch) if own is not None and _is_small(own)
        ]
        self._before = _Copies(call.read, moved.read)
        self._after = _Copies(moved.written, call.written)

    def copy_in(self, call: CallTensors) -> None:
        """Copy the small tensors that a call reads to the memory of the graph."""
        self._before.copy_from(call.read)

    def copy_out(self, call: CallTensors) -> None:
        """Copy the results in the memory of the graph to the small tensors that a call writes."""
        self._after.copy_to(call.written)


def in_static_memory(call: CallTensors) -> CallTensors:
    """Return the tensors of a call with uninitialized ones of the same sizes and strides in place of the small ones.

    Tensors that are read and lie in one allocation, such as the weights under autocast, have the same distances in the
    memory of the graph, because the work may compute neighbours together.
    """
    # Calls in and outside of inference mode replay the same graph.
    with torch.inference_mode(False):
        written = tuple([_moved(own) for own in call.written])
        return CallTensors(_moved_together(call.read), written, _moved(call.scratch))


def can_be_static(call: CallTensors) -> bool:
    """Return whether a graph can have memory for the small tensors of a call: they are not too large together."""
    dense = all(own is None or not _is_small(own) or _is_dense(own) for own in (*call.read, *call.written))
    return dense and size_of(call) <= _MOST_BYTES


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


def _moved_together(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return memory as `_moved` does, for the parts of an allocation in one piece unless they overlap."""
    parts: dict[int, list[Tensor]] = {}
    for own in tensors:
        if own is not None and _is_small(own) and own.numel():
            parts.setdefault(own.untyped_storage().data_ptr(), []).append(own)
    # Tensors that overlap in this call, such as two states that are one, may be apart in another one.
    pieces = {start: _Allocation(each) for start, each in parts.items() if len(each) > 1 and not _overlap(each)}

    def moved(own: Tensor | None) -> Tensor | None:
        piece = None if own is None or not _is_small(own) else pieces.get(own.untyped_storage().data_ptr())
        return _moved(own) if piece is None or own is None or not own.numel() else piece.part_like(own)

    return tuple([moved(own) for own in tensors])


def _overlap(tensors: Sequence[Tensor]) -> bool:
    ends = sorted((own.data_ptr(), own.data_ptr() + own.nbytes) for own in tensors)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ends))


class _Allocation:
    """A new allocation with room for the parts of another one.

    Args:
        parts: The parts.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._start = min(own.data_ptr() for own in parts) // ALIGNMENT * ALIGNMENT
        size = max(own.data_ptr() + own.nbytes for own in parts) - self._start
        self._memory = torch.empty(size, dtype=torch.uint8, device=parts[0].device)

    def part_like(self, part: Tensor) -> Tensor:
        """Return the memory for a part, as far from the beginning of the allocation."""
        first = part.data_ptr() - self._start
        values = self._memory[first : first + part.nbytes].view(part.dtype)
        return values.as_strided(part.shape, part.stride())


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

"""The nodes of a recorded graph: what each was launched with, as words that can be read and changed."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import NamedTuple

_WORD = 8
_BUFFER, _LENGTH = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE

_OF_PYTORCH = b"_ZN2at"  # names of C++'s namespace "at"

_log = logging.getLogger(__name__)


class _KernelFields(ctypes.Structure):
    """The driver's struct CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("launch", ctypes.c_uint * 7),  # grid, block, shared memory
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class Words(NamedTuple):
    """A node as it was; attributes as those of `Node`."""

    words: tuple[int, ...]
    identity: Hashable
    has_gaps: bool


class Node:
    """A node of a graph.

    Attributes:
        words: What it is launched with, 64 bits each; `write` hands changes of them to an executable graph.
        identity: What else it is: equal for two nodes that differ in words alone.
        has_gaps: Whether it is a kernel of PyTorch's. It takes each address as a word of its own, and gaps between and
            fields without a meaning hold whatever lay on the CPU's stack before.
    """

    def __init__(
        self,
        words: ctypes.Array[ctypes.c_uint64],
        identity: Hashable,
        set_in: Callable[[object], tuple],
        held: object = None,
        *,
        has_gaps: bool = False,
    ) -> None:
        self.words = words
        self.identity = identity
        self.has_gaps = has_gaps
        self._set_in = set_in
        self._held = held

    def copy(self) -> Words:
        """Return what it is now, which later changes leave alone."""
        return Words(tuple(self.words), self.identity, self.has_gaps)

    def write(self, executable: object) -> bool:
        """Let future launches of an executable graph have these words; return whether the driver did it."""
        return int(self._set_in(executable)[0]) == 0


class _UnknownError(Exception):
    """A node whose words cannot be read; says why."""


def read(driver: ModuleType, graph: object) -> list[Node] | None:
    """Return the nodes of a graph in the order they were recorded; None if there is one whose words are not known."""
    try:
        _, count = _known(driver.cuGraphGetNodes(graph), "nodes")
        handles, count = _known(driver.cuGraphGetNodes(graph, count), "nodes") if count else ([], 0)
        return [_read(driver, handle) for handle in handles[:count]]
    except (
        _UnknownError,
        AttributeError,
        RuntimeError,
    ) as error:  # the latter two from versions without these functions
        _log.info("what a recording launches is not known: %s", error)
        return None


def _known(outcome: tuple, what: str) -> tuple:
    if int(outcome[0]) != 0:
        raise _UnknownError(f"{what}: {outcome[0].name}")
    return outcome[1:]


def _read(driver: ModuleType, handle: object) -> Node:
    (kind,) = _known(driver.cuGraphNodeGetType(handle), "a node's kind")
    kinds = driver.CUgraphNodeType
    readers = {
        kinds.CU_GRAPH_NODE_TYPE_KERNEL: _kernel,
        kinds.CU_GRAPH_NODE_TYPE_MEMSET: _memset,
        kinds.CU_GRAPH_NODE_TYPE_MEMCPY: _copy,
        kinds.CU_GRAPH_NODE_TYPE_EMPTY: _nothing,
    }
    if kind not in readers:
        raise _UnknownError(f"{kind.name}")
    return readers[kind](driver, handle)


def _kernel(driver: ModuleType, handle: object) -> Node:
    (given,) = _known(driver.cuGraphKernelNodeGetParams(handle), "a kernel's parameters")
    fields = _KernelFields.from_address(given.getPtr())
    function = fields.function or fields.kernel
    if not function:
        raise _UnknownError("a kernel without a function")
    sizes = _sizes(driver, fields)
    if not sizes:  # every kernel has some: a driver that does not tell them must not pass for one of which none move
        raise _UnknownError("a kernel without parameters")
    end = max(offset + size for offset, size in sizes)
    words = (ctypes.c_uint64 * (-(-end // _WORD)))()
    begin = ctypes.addressof(words)
    if fields.parameters:
        theirs = (ctypes.c_void_p * len(sizes)).from_address(fields.parameters)
        for (offset, size), place in zip(sizes, theirs, strict=True):
            ctypes.memmove(begin + offset, place, size)
    elif fields.extra:
        buffer, length = _buffer(fields.extra)
        if length < end:
            raise _UnknownError("a kernel with fewer parameters than it takes")
        ctypes.memmove(begin, buffer, end)
    else:
        raise _UnknownError("a kernel without its parameters")
    places = (ctypes.c_void_p * len(sizes))(*(begin + offset for offset, _ in sizes))
    fields.parameters, fields.extra = ctypes.addressof(places), None
    identity = "kernel", function, tuple(fields.launch), tuple(sizes)
    write = driver.cuGraphExecKernelNodeSetParams
    gaps = _name(driver, fields).startswith(_OF_PYTORCH)
    return Node(words, identity, lambda executable: write(executable, handle, given), places, has_gaps=gaps)


def _name(driver: ModuleType, fields: _KernelFields) -> bytes:
    if fields.function:
        (name,) = _known(driver.cuFuncGetName(driver.CUfunction(fields.function)), "a kernel's name")
    else:
        (name,) = _known(driver.cuKernelGetName(driver.CUkernel(fields.kernel)), "a kernel's name")
    return name


def _buffer(extra: int) -> tuple[int, int]:
    # An array of a name and a value in turn, ended by 0: where all parameters lie as one, and how long it is.
    found: dict[int, int] = {}
    entries = (ctypes.c_void_p * 5).from_address(extra)
    for index in (0, 2):
        if not entries[index]:
            break
        found[entries[index]] = entries[index + 1]
    if _BUFFER not in found or _LENGTH not in found:
        raise _UnknownError("a kernel with parameters in an unknown form")
    return found[_BUFFER], ctypes.c_size_t.from_address(found[_LENGTH]).value


def _sizes(driver: ModuleType, fields: _KernelFields) -> list[tuple[int, int]]:
    if fields.function:
        asked, of = driver.cuFuncGetParamInfo, driver.CUfunction(fields.function)
    else:
        asked, of = driver.cuKernelGetParamInfo, driver.CUkernel(fields.kernel)
    sizes: list[tuple[int, int]] = []
    while True:
        outcome = asked(of, len(sizes))
        if outcome[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # there are no more
            return sizes
        sizes.append(_known(outcome, "a kernel's list of parameters"))  # type: ignore[arg-type]


def _memset(driver: ModuleType, handle: object) -> Node:
    (given,) = _known(driver.cuGraphMemsetNodeGetParams(handle), "a memset's parameters")
    words = (ctypes.c_uint64 * 1)(int(given.dst))
    identity = "memset", given.pitch, given.value, given.elementSize, given.width, given.height

    def set_in(executable: object) -> tuple:
        given.dst = driver.CUdeviceptr(words[0])
        return driver.cuGraphExecMemsetNodeSetParams(executable, handle, given, driver.cuCtxGetCurrent()[1])

    return Node(words, identity, set_in)


def _copy(driver: ModuleType, handle: object) -> Node:
    (given,) = _known(driver.cuGraphMemcpyNodeGetParams(handle), "a copy's parameters")
    kinds, types = driver.CUmemorytype, (given.srcMemoryType, given.dstMemoryType)
    flat = given.Height <= 1 and given.Depth <= 1 and given.srcXInBytes == 0 and given.dstXInBytes == 0
    if not flat or any(kind not in (kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_UNIFIED) for kind in types):
        raise _UnknownError(f"a copy between {' and '.join(kind.name for kind in types)}")
    words = (ctypes.c_uint64 * 2)(int(given.srcDevice), int(given.dstDevice))
    identity = "copy", given.WidthInBytes, *map(int, types)

    def set_in(executable: object) -> tuple:
        given.srcDevice, given.dstDevice = (driver.CUdeviceptr(word) for word in words)
        return driver.cuGraphExecMemcpyNodeSetParams(executable, handle, given, driver.cuCtxGetCurrent()[1])

    return Node(words, identity, set_in)


def _nothing(driver: ModuleType, handle: object) -> Node:
    return Node((ctypes.c_uint64 * 0)(), "empty", lambda executable: (0,))

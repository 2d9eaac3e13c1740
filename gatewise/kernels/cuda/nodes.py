"""The nodes of a recorded graph: what each was launched with, as words that can be read and changed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import NamedTuple

_WORD = 8


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


class Node:
    """A node of a graph.

    Attributes:
        words: What it is launched with, 64 bits each; `write` hands changes of them to an executable graph.
        identity: What else it is: equal for two nodes that differ in words alone.
    """

    def __init__(
        self, words: ctypes.Array[ctypes.c_uint64], identity: Hashable, set_in: Callable[[object], tuple], held: object
    ) -> None:
        self.words = words
        self.identity = identity
        self._set_in = set_in
        self._held = held

    def copy(self) -> Words:
        """Return what it is now, which later changes leave alone."""
        return Words(tuple(self.words), self.identity)

    def write(self, executable: object) -> bool:
        """Let future launches of an executable graph have these words; return whether the driver did it."""
        return int(self._set_in(executable)[0]) == 0


def read(driver: ModuleType, graph: object) -> list[Node] | None:
    """Return the nodes of a graph in the order they were recorded; None if there is one whose words are not known."""
    status, _, count = driver.cuGraphGetNodes(graph)
    if int(status) != 0:
        return None
    status, handles, count = driver.cuGraphGetNodes(graph, count)
    if int(status) != 0:
        return None
    found = [_read(driver, handle) for handle in handles[:count]]
    return None if None in found else found  # type: ignore[return-value]


def _read(driver: ModuleType, handle: object) -> Node | None:
    status, kind = driver.cuGraphNodeGetType(handle)
    if int(status) != 0:
        return None
    kinds = driver.CUgraphNodeType
    readers = {
        kinds.CU_GRAPH_NODE_TYPE_KERNEL: _kernel,
        kinds.CU_GRAPH_NODE_TYPE_MEMSET: _memset,
        kinds.CU_GRAPH_NODE_TYPE_MEMCPY: _copy,
        kinds.CU_GRAPH_NODE_TYPE_EMPTY: _nothing,
    }
    return readers[kind](driver, handle) if kind in readers else None


def _kernel(driver: ModuleType, handle: object) -> Node | None:
    status, given = driver.cuGraphKernelNodeGetParams(handle)
    if int(status) != 0:
        return None
    fields = _KernelFields.from_address(given.getPtr())
    function = fields.function or fields.kernel
    if not function or (not fields.parameters and fields.extra):
        return None
    sizes = _sizes(driver, fields)
    end = max((offset + size for offset, size in sizes), default=0)
    words = (ctypes.c_uint64 * (-(-end // _WORD)))()
    begin, places = ctypes.addressof(words), (ctypes.c_void_p * len(sizes))()
    if sizes:
        theirs = (ctypes.c_void_p * len(sizes)).from_address(fields.parameters)
        for index, (offset, size) in enumerate(sizes):
            ctypes.memmove(begin + offset, theirs[index], size)
            places[index] = begin + offset
        fields.parameters = ctypes.addressof(places)
    identity = "kernel", function, tuple(fields.launch), tuple(sizes)
    write = driver.cuGraphExecKernelNodeSetParams
    return Node(words, identity, lambda executable: write(executable, handle, given), places)


def _sizes(driver: ModuleType, fields: _KernelFields) -> list[tuple[int, int]]:
    if fields.function:
        asked, of = driver.cuFuncGetParamInfo, driver.CUfunction(fields.function)
    else:
        asked, of = driver.cuKernelGetParamInfo, driver.CUkernel(fields.kernel)
    sizes: list[tuple[int, int]] = []
    while True:
        status, offset, size = asked(of, len(sizes))
        if int(status) != 0:  # there are no more
            return sizes
        sizes.append((offset, size))


def _memset(driver: ModuleType, handle: object) -> Node | None:
    status, given = driver.cuGraphMemsetNodeGetParams(handle)
    if int(status) != 0:
        return None
    words = (ctypes.c_uint64 * 1)(int(given.dst))
    identity = "memset", given.pitch, given.value, given.elementSize, given.width, given.height

    def set_in(executable: object) -> tuple:
        given.dst = driver.CUdeviceptr(words[0])
        return driver.cuGraphExecMemsetNodeSetParams(executable, handle, given, _context(driver))

    return Node(words, identity, set_in, None)


def _copy(driver: ModuleType, handle: object) -> Node | None:
    status, given = driver.cuGraphMemcpyNodeGetParams(handle)
    if int(status) != 0:
        return None
    words = (ctypes.c_uint64 * 2)(int(given.srcDevice), int(given.dstDevice))
    kinds = given.srcMemoryType, given.dstMemoryType
    flat = given.Height <= 1 and given.Depth <= 1 and given.srcXInBytes == 0 and given.dstXInBytes == 0
    if not flat or driver.CUmemorytype.CU_MEMORYTYPE_ARRAY in kinds or driver.CUmemorytype.CU_MEMORYTYPE_HOST in kinds:
        return None
    identity = "copy", given.WidthInBytes, *map(int, kinds)

    def set_in(executable: object) -> tuple:
        given.srcDevice, given.dstDevice = (driver.CUdeviceptr(word) for word in words)
        return driver.cuGraphExecMemcpyNodeSetParams(executable, handle, given, _context(driver))

    return Node(words, identity, set_in, None)


def _nothing(driver: ModuleType, handle: object) -> Node:
    return Node((ctypes.c_uint64 * 0)(), "empty", lambda executable: (0,), None)


def _context(driver: ModuleType) -> object:
    return driver.cuCtxGetCurrent()[1]

"""Launch the small kernels around the passes: pad and crop, sort rows, activate gates."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Cell
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.derivation.device import device_code
from gatewise.kernels.cuda import driver, formats, toolchain
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launches.compiled import SOURCES, Launch, pointers_of_each_direction
from gatewise.kernels.persistent.launches.passes import LayerWeights, planes
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.padding import hidden_of

AT_ONCE = {"fit": 4, "operands": 8, "half_results": 4}
"""The number of rows of which a thread of each source has values under way (benchmarks/results/copies.jsonl)."""
_THREADS = 128
_SORTING_THREADS = 256
_MOST_BLOCKS = 2048  # about as many as fit on an H200, 16 on a multiprocessor; each takes several rows


def fill_unwritten(buffer: Tensor) -> Tensor:
    """Fill a contiguous tensor with the pattern that means "not yet written" to the kernels, and return it."""
    if buffer.is_meta:
        return buffer
    with driver.on(buffer.device):
        driver.fill_with_ones(buffer)
    return buffer


class _Fit(ctypes.Structure):
    """The struct `Fit` of fit.cu, field by field."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("source_group", "source_columns", "rows", "group", "columns")),
        ("largest", ctypes.c_void_p),
    ]


def resized(
    matrix: Tensor,
    rows: int,
    columns: int,
    groups: int = 1,
    *,
    scratch: Scratch | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Return a matrix [groups * rows, columns]: `matrix`, padded with zeros or cropped.

    Args:
        matrix: The matrix [groups * any, any], which is returned itself if it has the size asked for, its address is a
            multiple of 16 bytes, and `into` is None.
        rows: The number of rows of each group.
        columns: The number of columns.
        groups: The number of groups of rows; each group is padded or cropped by itself.
        scratch: The memory that the result is allocated in; None to allocate it by PyTorch.
        into: A contiguous tensor for the result, or None to allocate it.
    """
    if into is None and matrix.shape == (groups * rows, columns) and matrix.data_ptr() % 16 == 0:
        return matrix.contiguous()
    target = (scratch or matrix).new_empty(groups * rows, columns) if into is None else into
    return _fitted(matrix, target, groups)


def _fitted(matrix: Tensor, target: Tensor, groups: int, largest: Tensor | None = None) -> Tensor:
    """Write a matrix to a contiguous one of another size, in float16 if the exponents of its columns are given."""
    if target.is_meta or not target.numel():
        return target
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    (rows, columns), (source_rows, source_columns) = target.shape, matrix.shape
    stride, size, start = matrix.stride(0), matrix.element_size(), matrix.data_ptr()
    end = target.data_ptr() * (size // target.element_size())
    found = 0 if largest is None else largest.data_ptr()
    word = math.gcd(16, start, end, stride * size, source_columns * size, columns * size, found)
    values = word // size
    sizes = stride // values, source_rows // groups, source_columns // values
    arguments = _Fit(start, target.data_ptr(), *sizes, rows, rows // groups, columns // values, found or None)
    shape = copying_shape("fit", rows, columns // values)
    with driver.on(matrix.device):
        binary = copying_code("fit", word, matrix.device, halves=largest is not None)
        driver.launch(binary, "recurrent_fit", shape, arguments, matrix.device)
    return target


def halved(matrix: Tensor, rows: int, columns: int, groups: int, largest: Tensor, scratch: Scratch) -> Tensor:
    """Return a float32 matrix [groups * rows, columns], as `resized`, in float16.

    The values of each column are multiplied by the power of two that brings the largest to [2^14, 2^15).

    Args:
        matrix: The matrix.
        rows: The number of rows of each group.
        columns: The number of columns, a multiple of 8.
        groups: The number of groups of rows.
        largest: The exponent of the largest value of each column, int32, from `scale_columns`.
        scratch: The memory that the result is allocated in.
    """
    return _fitted(matrix, scratch.new_empty(groups * rows, columns, dtype=torch.float16), groups, largest)


def copying_shape(name: str, rows: int, words: int, matrices: int = 1) -> driver.Shape:
    """Return the launch of a source whose threads copy a word of each of `AT_ONCE` rows, which have so many words."""
    return driver.Shape((-(-rows // AT_ONCE[name]), -(-words // _THREADS), matrices), _THREADS, 0, cooperative=False)


@functools.lru_cache(maxsize=128)
def copying_code(name: str, word: int, device: torch.device, resets: bool = False, halves: bool = False) -> bytes:
    """Return the machine code of a `Copying` for a device."""
    return Copying(name, word, Device.probe(device).architecture, resets, halves).compile()


class Copying(NamedTuple):
    """The machine code of a kernel that copies rows.

    Attributes:
        name: The name of the source: "fit" or "operands".
        word: The number of bytes that a thread copies at once.
        architecture: The architecture.
        resets: Whether episodes begin inside of sequences.
        halves: Whether float32 numbers are copied as float16 numbers.
    """

    name: str
    word: int
    architecture: str
    resets: bool = False
    halves: bool = False

    @property
    def source(self) -> Copying:
        """The key of the machine code."""
        return self

    def compile(self) -> bytes:
        """Compile the source, or take it from the cache on the disk."""
        macros = {"BYTES": self.word, "RESETS": int(self.resets), "HALVES": int(self.halves)}
        macros |= {"AT_ONCE": AT_ONCE[self.name]}
        macros |= formats.macros(torch.float32) if self.halves else {}
        return toolchain.compile_source(SOURCES / f"{self.name}.cu", self.architecture, macros)


class _Order(ctypes.Structure):
    """The struct `Order` of order.cu, field by field."""

    _fields_ = [("lengths", ctypes.c_void_p), ("order", ctypes.c_void_p), ("batch", ctypes.c_int)]


def longest_first(launch: Launch, lengths: Tensor | None, scratch: Scratch) -> Tensor | None:
    """Return the rows of a batch [B] sorted by length, the longest first; None where a launch gains nothing by it.

    A launch gains where it takes several groups of rows one after another: groups of short rows end early then. Groups
    that all run at the same time are as fast in any order.
    """
    if lengths is None or launch.tiling.groups <= launch.tiling.together:
        return None
    batch = lengths.shape[0]
    order = scratch.new_empty(batch, dtype=torch.int32)
    if order.is_meta:
        return order
    arguments = _Order(lengths.data_ptr(), order.data_ptr(), batch)
    shape = driver.Shape((-(-batch // _SORTING_THREADS), 1, 1), _SORTING_THREADS, 0, cooperative=False)
    with driver.on(lengths.device):
        driver.launch(_sorting_code(lengths.device), "recurrent_order", shape, arguments, lengths.device)
    return order


@functools.lru_cache(maxsize=8)
def _sorting_code(device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    return toolchain.compile_source(SOURCES / "order.cu", architecture, {"THREADS": _SORTING_THREADS})


class _Activate(ctypes.Structure):
    """The struct `Activate` of activate.cu, field by field."""

    _fields_ = [*pointers_of_each_direction("gates", "unwritten", "bias_ih", "bias_hh"), ("tokens", ctypes.c_int)]


def activate(problem: Problem, weights: LayerWeights, gates: Tensor, dgates: Tensor | None, tokens: int) -> None:
    """Add the biases to gate sums and apply the activation functions, in place; mark the gradients as not yet written.

    Args:
        problem: The problem, which gives the cell, the size and the dtype.
        weights: The weights, of which the biases are read.
        gates: The gate sums [D, any, 4H], H padded.
        dgates: Memory for their gradients, of the same size, which is filled as by `fill_unwritten`; None if it is that
            of `gates`, see `memory.exchanges_in_gates`.
        tokens: The number of tokens of each direction that are activated, from the first on.
    """
    if gates.is_meta:
        return
    directions, _, width = gates.shape
    columns = -(-width // 4 * gates.element_size() // (16 * _THREADS))
    rows = max(1, min(tokens, _MOST_BLOCKS // (columns * directions)))
    shape = driver.Shape((rows, columns, directions), _THREADS, 0, cooperative=False)
    arguments = _Activate(*planes(gates), *planes(dgates), *weights.bias_ih, *weights.bias_hh, tokens)
    with driver.on(gates.device):
        binary = _activating_code(
            problem.cell, problem.hidden_size, problem.dtype, exact_products(problem), gates.device
        )
        driver.launch(binary, "recurrent_activate", shape, arguments, gates.device)


@functools.lru_cache(maxsize=256)
def _activating_code(cell: Cell, hidden_size: int, dtype: torch.dtype, exact: bool, device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    macros = activating_macros(hidden_size, dtype, exact)
    return toolchain.compile_source(SOURCES / "activate.cu", architecture, macros, device_code(cell))


def activating_macros(hidden_size: int, dtype: torch.dtype, exact: bool) -> dict[str, int]:
    """Return the template parameters of activate.cu."""
    sizes = {"SIZE": hidden_size, "HIDDEN": hidden_of(hidden_size)}
    return {**sizes, **formats.macros(dtype), "EXACT": int(exact)}

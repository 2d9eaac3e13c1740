"""Sizes are rounded up to a multiple of 8, which tensor cores want, by zeros beside the matrices."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import driver, toolchain
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launch import SOURCES, on
from gatewise.kernels.persistent.plan import hidden_of

_THREADS = 128
_MOST_BLOCKS = 2048  # about as many as an H200 has room for, 16 on a multiprocessor; they take several rows each


class _Fit(ctypes.Structure):
    """The struct `Fit` of fit.cu, field by field."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("source_group", "source_columns", "rows", "group", "columns")),
    ]


def fitted(
    matrix: Tensor,
    rows: int,
    columns: int,
    groups: int = 1,
    *,
    scratch: Scratch | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Return a matrix [groups * rows, columns] with what fits of `matrix`, and zeros.

    Args:
        matrix: [groups * any, any]; returned as it is if it has that size and begins on 16 bytes, and not `into`.
        rows: Rows of each group.
        columns: Columns.
        groups: Groups of rows, each of which is fitted for itself.
        scratch: Where the result is made; None for memory of its own.
        into: Contiguous; the result, if given.
    """
    if into is None and matrix.shape == (groups * rows, columns) and matrix.data_ptr() % 16 == 0:
        return matrix.contiguous()
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    target = (scratch or matrix).new_empty(groups * rows, columns) if into is None else into
    if not target.numel():
        return target
    stride, source_columns = matrix.stride(0), matrix.shape[1]
    size, start, end = matrix.element_size(), matrix.data_ptr(), target.data_ptr()
    word = math.gcd(16, start, end, stride * size, source_columns * size, columns * size)
    values = word // size
    sizes = stride // values, matrix.shape[0] // groups, source_columns // values
    arguments = _Fit(start, end, *sizes, groups * rows, rows, columns // values)
    shape = driver.Shape((min(groups * rows, _MOST_BLOCKS), 1, 1), _THREADS, 0, cooperative=False)
    with on(matrix.device):
        driver.launch(_code(word, matrix.device), "recurrent_fit", shape, arguments, matrix.device)
    return target


@functools.lru_cache(maxsize=64)
def _code(word: int, device: torch.device) -> bytes:
    architecture = Device.probe(device).architecture
    return toolchain.compile_source(SOURCES / "fit.cu", architecture, {"BYTES": word})


def columns_widened(matrix: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return a matrix with its columns rounded up."""
    return fitted(matrix, matrix.shape[0], hidden_of(matrix.shape[1]), scratch=scratch)


def as_wide(matrix: Tensor, scratch: Scratch) -> Tensor:
    """Return a matrix with its columns rounded up; where none are missing and rows begin on 16 bytes, as it lies."""
    return matrix if is_wide(matrix) else columns_widened(matrix, scratch)


def is_wide(matrix: Tensor) -> bool:
    """Whether a matrix is as products want it: columns a multiple of 8, rows that begin on 16 bytes."""
    row = matrix.stride(0) * matrix.element_size()
    return matrix.shape[1] % 8 == 0 and matrix.stride(1) == 1 and (row | matrix.data_ptr()) % 16 == 0


def gates_widened(
    matrix: Tensor, problem: Problem, scratch: Scratch | None = None, into: Tensor | None = None
) -> Tensor:
    """Return a matrix [G * H, any] with each gate's rows, and the columns, rounded up; H may be so already."""
    sizes = hidden_of(problem.hidden_size), hidden_of(matrix.shape[1])
    return fitted(matrix, *sizes, len(problem.cell.gates), scratch=scratch, into=into)


def gates_narrowed(matrix: Tensor, size: int, columns: int, into: Tensor | None = None) -> Tensor:
    """Return a matrix of all gates' rows without what was added to them."""
    return fitted(matrix, size, columns, matrix.shape[0] // hidden_of(size), into=into)

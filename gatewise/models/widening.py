"""Padding of matrices to the row sizes that the matrix kernels of GPUs require: multiples of 16 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.models import fused_rows

_ALIGNED = 8  # numbers of 16 bits in 16 bytes; wider numbers are then aligned too


def is_aligned(*sizes: int, itemsize: int = 2) -> bool:
    """Return whether rows of these numbers of elements can use the fast matrix kernels."""
    return not any(size * itemsize % 16 for size in sizes)


def widened(matrix: Tensor, column: Tensor | float, dtype: torch.dtype, height: int | None) -> Tensor:
    """Return a matrix with one more column, padded with zeros to aligned sizes; a given height is not padded."""
    count, size = matrix.shape
    wide = matrix.new_empty(height or widened_rows(count), widened_columns(size), dtype=dtype)
    if fused_rows.can_copy(matrix, dtype):
        numbers = column if isinstance(column, Tensor) else matrix.new_full((count,), column)
        fused_rows.widen(matrix, numbers.contiguous(), wide)
        return wide
    copied(matrix, wide[:count, :size])
    wide[:count, size] = column
    wide[:count, size + 1 :].zero_()
    wide[count:].zero_()
    return wide


def widened_rows(count: int) -> int:
    """Return the number of rows of the result of `widened` for a matrix of this many rows, without a given height."""
    return _rounded_up(count)


def widened_columns(size: int) -> int:
    """Return the number of columns of the result of `widened` for a matrix with this many columns."""
    return _rounded_up(size + 1)


def copied(matrix: Tensor, to: Tensor) -> Tensor:
    """Copy a matrix whose rows are contiguous, several numbers at a time if the dtypes are equal."""
    for wider in (torch.int64, torch.int32):
        steps = matrix.stride(0), to.stride(0), matrix.shape[1], matrix.storage_offset(), to.storage_offset()
        if matrix.dtype == to.dtype and not any(each * to.itemsize % wider.itemsize for each in steps):
            to.view(wider).copy_(matrix.view(wider))
            return to
    return to.copy_(matrix)


def _rounded_up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

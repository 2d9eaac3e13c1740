"""Launching the Triton kernel of `rows_program`; this module imports without Triton."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gatewise.contract import triton_kernels
from gatewise.contract.device import Device

_BLOCK, _WARPS = 1024, 4
_WORD = 16  # bytes, the most that a thread loads at once


def can_copy(matrix: Tensor, to: torch.dtype) -> bool:
    """Return whether `widen` and `scale` can copy a matrix to this dtype."""
    fits = matrix.stride(1) == 1 and triton_kernels.float32_holds(matrix.dtype, to)
    return matrix.is_cuda and fits and Device.probe(matrix.device).triton


def widen(matrix: Tensor, column: Tensor, into: Tensor) -> None:
    """Write the rows of a matrix, each followed by a number and by zeros, and rows of zeros after the last.

    Args:
        matrix: The matrix [N, F].
        column: The number of each row [N].
        into: The contiguous matrix for the result, with at least N rows and F + 1 columns.
    """
    _launch(matrix, column, matrix, into, widens=True)


def scale(matrix: Tensor, factor: Tensor, into: Tensor) -> None:
    """Write a matrix times a factor, which are multiplied in float32.

    Args:
        matrix: The matrix [N, F].
        factor: The factor, a scalar on the device.
        into: The contiguous matrix for the result [N, F].
    """
    _launch(matrix, matrix, factor, into, widens=False)


def _launch(matrix: Tensor, column: Tensor, factor: Tensor, into: Tensor, *, widens: bool) -> None:
    rows, width = into.shape
    if not rows:
        return
    strides = matrix.stride(0), into.stride(0)
    values = [math.gcd(stride, _WORD // each.itemsize) for stride, each in zip(strides, (matrix, into), strict=True)]
    triton_kernels.launch(
        _FUNCTION, (rows,), (matrix, column, factor, into, *matrix.shape, width, *strides),
        num_warps=_WARPS, SOURCE_VALUES=values[0], TARGET_VALUES=values[1], WIDENS=widens, SCALES=not widens,
        BLOCK=_BLOCK,
    )  # fmt: skip


def launches(
    vocabulary: int, size: int, height: int, width: int, dtype: torch.dtype, *, gradient: bool
) -> list[triton_kernels.TritonLaunch]:
    """Return the launches around the softmax of a model with float32 weights, for compiling them ahead of it.

    Args:
        vocabulary: The number of rows of the weight.
        size: The size of its rows.
        height: The number of rows of the widened weight.
        width: The size of its rows.
        dtype: The dtype of the products.
        gradient: Whether gradients are computed.
    """
    weight, bias, wide, hidden, ones, factor, sums = (
        torch.empty(shape, dtype=number, device="meta")
        for shape, number in (
            ((vocabulary, size), torch.float32),
            ((vocabulary,), torch.float32),
            ((height, width), dtype),
            ((1, size), dtype),
            ((1,), dtype),
            ((), torch.float32),
            ((height, width), dtype),
        )
    )
    with triton_kernels.noted() as found:
        widen(weight, bias, wide)
        widen(hidden, ones, wide[:1])
        if gradient:
            scale(sums[:vocabulary, :size], factor, weight)
    return found


def _load() -> Any:
    from gatewise.models.rows_program import rows_program

    return rows_program


_FUNCTION = triton_kernels.TritonFunction(_load)

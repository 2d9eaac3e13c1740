"""Launching the Triton kernels of `table_program`; this module imports without Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gatewise.contract import triton_kernels
from gatewise.contract.device import Device

MOST_TOKENS = 4096
"""The largest number of tokens: each is compared with all."""

_COMPARED, _ADDED, _COLUMNS, _WARPS = 1024, 8, 256, 4


def can_add(gradient: Tensor, tokens: Tensor) -> bool:
    """Return whether `table_gradient` can add up these gradients of the rows of tokens."""
    in_float32 = gradient.is_floating_point() and gradient.element_size() <= 4
    fits = 0 < tokens.numel() <= MOST_TOKENS and gradient.shape[-1] > 0
    return gradient.is_cuda and in_float32 and fits and Device.probe(gradient.device).triton


def table_gradient(gradient: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """Return the gradient of a matrix [rows, E], of which the rows of tokens were looked up.

    The gradients of a token are added up in float32, in the order of their places, so that the same gradients give the
    same bits.

    Args:
        gradient: The gradients of the rows that were looked up [..., E].
        tokens: The tokens [...], int64 or int32.
        rows: The number of rows of the matrix.
    """
    width, numbers = gradient.shape[-1], tokens.reshape(-1)
    values = gradient.reshape(-1, width).contiguous()
    count = numbers.numel()
    order, starts, lengths = numbers.new_empty(3, count, dtype=torch.int32).unbind()
    found = values.new_zeros(rows, width)
    triton_kernels.launch(
        _ORDER, (count,), (numbers, order, starts, lengths, count), num_warps=_WARPS, COMPARED=_COMPARED
    )
    triton_kernels.launch(
        _TABLE, (count, -(-width // _COLUMNS)), (numbers, values, order, starts, lengths, found, width),
        num_warps=_WARPS, ADDED=_ADDED, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return found


def _load_order() -> Any:
    from gatewise.models.table_program import order_program

    return order_program


def _load_table() -> Any:
    from gatewise.models.table_program import table_program

    return table_program


_ORDER, _TABLE = triton_kernels.TritonFunction(_load_order), triton_kernels.TritonFunction(_load_table)

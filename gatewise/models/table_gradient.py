"""Launching the Triton kernels of `table_program`; this module imports without Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gatewise.contract import triton_kernels
from gatewise.contract.device import Device
from gatewise.functional.batched_gradients import is_batched

MOST_TOKENS = 4096
"""The largest number of tokens: each is compared with all. More were not measured.

The kernels take 0.27 to 0.56 of the time of PyTorch's operator for 700 to 4,096 tokens on an H200, with the numbers
below (`benchmarks/results/table_gradient.jsonl`).
"""

_COMPARED, _ADDED, _COLUMNS, _WARPS = 1024, 8, 256, 4
_ALIGNED = 4  # numbers of 4 bytes: Triton compiles a kernel again for an address that is not a multiple of 16 bytes


def can_add(gradient: Tensor, tokens: Tensor) -> bool:
    """Return whether `table_gradient` can add up these gradients of the rows of tokens."""
    # Subclasses of tensors, such as those that are distributed, have operators of their own.
    if type(gradient) not in (Tensor, nn.Parameter) or is_batched(gradient):
        return False
    if not gradient.is_cuda or not triton_kernels.float32_holds(gradient.dtype):
        return False
    return 0 < tokens.numel() <= MOST_TOKENS and gradient.shape[-1] > 0 and Device.probe(gradient.device).triton


def table_gradient(gradient: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """Return the gradient of a matrix [rows, E], of which the rows of tokens were looked up.

    The gradients of a token are added up in float32, in the order of their places, so that the same gradients give the
    same bits.

    Args:
        gradient: The gradients of the rows that were looked up [..., E].
        tokens: The tokens [...], int64 or int32.
        rows: The number of rows of the matrix.
    """
    width, numbers = gradient.shape[-1], tokens.reshape(-1).contiguous()
    values = gradient.reshape(-1, width).contiguous()
    count = numbers.numel()
    aligned = -(-count // _ALIGNED) * _ALIGNED
    order, starts, lengths = numbers.new_empty(3, aligned, dtype=torch.int32).unbind()
    found = values.new_zeros(rows, width)
    triton_kernels.launch(
        _ORDER, (count,), (numbers, order, starts, lengths, count), num_warps=_WARPS, COMPARED=_COMPARED
    )
    triton_kernels.launch(
        _TABLE, (count, -(-width // _COLUMNS)), (numbers, values, order, starts, lengths, found, width),
        num_warps=_WARPS, ADDED=_ADDED, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return found


def launches(width: int, dtype: torch.dtype) -> list[triton_kernels.TritonLaunch]:
    """Return the launches of `table_gradient` for a matrix with E columns and int64 tokens, for compiling them ahead.

    Args:
        width: The number of columns, E.
        dtype: The dtype of the matrix.
    """
    gradient = torch.empty(1, width, dtype=dtype, device="meta")
    with triton_kernels.noted() as found:
        table_gradient(gradient, torch.empty(1, dtype=torch.int64, device="meta"), 1)
    return found


def _load_order() -> Any:
    from gatewise.models.table_program import order_program

    return order_program


def _load_table() -> Any:
    from gatewise.models.table_program import table_program

    return table_program


_ORDER, _TABLE = triton_kernels.TritonFunction(_load_order), triton_kernels.TritonFunction(_load_table)

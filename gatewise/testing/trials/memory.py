"""Memory filled with NaN, so that reads of uninitialised memory or beyond the end of a tensor are detected."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WALL = 1 << 14  # the number of values before and after a tensor
_SMALLEST, _LARGEST = 8, 25  # the sizes of blocks, as powers of two, in 16-bit values


def fill_free_memory(device: torch.device) -> None:
    """Fill the memory that an allocator will hand out next with NaN, in every floating-point dtype.

    Args:
        device: The device of the allocator. On a CPU this is the C library's, for which only small blocks are filled.
    """
    largest = _LARGEST if device.type == "cuda" else 18
    sizes = [2**power + 64 * more for power in range(_SMALLEST, largest) for more in range(3)]
    blocks = [torch.full((size,), -1, dtype=torch.int16, device=device) for size in sizes]
    del blocks


def walled(value: Tensor, *, odd: bool = False) -> Tensor:
    """Return a copy of a tensor with NaN before and after it in memory.

    Args:
        value: The tensor, of any floating-point dtype.
        odd: Whether the copy begins at an odd element, so that it is aligned only to its element size.
    """
    room = value.new_full((value.numel() + 2 * _WALL + 1,), math.nan)
    inside = room[_WALL + odd :][: value.numel()].view(value.shape)
    return inside.copy_(value)


def laid_out(value: Tensor, form: str) -> Tensor:
    """Return a copy of a tensor [T, B, I] in one of the memory layouts of `Setting.x`.

    Args:
        value: The tensor.
        form: The memory layout. "one row" repeats the first row of the batch.
    """
    time, batch, features = value.shape
    if form == "by row":
        return walled(value.transpose(0, 1)).transpose(0, 1)
    if form == "gaps":
        return _inside(value, (time, batch, features + 3), (slice(None), slice(None), slice(1, features + 1)))
    if form == "every other step":
        return _inside(value, (2 * time, batch, features), (slice(None, None, 2),))
    if form == "one row" and batch:
        return walled(value[:, :1]).expand(time, batch, features)
    return walled(value)


def _inside(value: Tensor, shape: Sequence[int], where: tuple[slice, ...]) -> Tensor:
    return value.new_full(shape, math.nan)[where].copy_(value)

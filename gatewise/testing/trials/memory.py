"""Memory that shows when it is read without having been written, or beyond the end of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_WALL = 1 << 14  # values before and after a tensor
_SMALLEST, _LARGEST = 8, 25  # powers of two, of 16-bit values


def fill_free_memory(device: torch.device) -> None:
    """Leave NaN, in every float dtype, in the memory that an allocator hands out next.

    Args:
        device: The device of the allocator. On a CPU it is the C library's, of which this reaches small blocks only.
    """
    largest = _LARGEST if device.type == "cuda" else 18
    sizes = [2**power + 64 * more for power in range(_SMALLEST, largest) for more in range(3)]
    blocks = [torch.full((size,), -1, dtype=torch.int16, device=device) for size in sizes]
    del blocks


def walled(value: Tensor, *, odd: bool = False) -> Tensor:
    """Return a copy of a tensor that lies between walls of NaN.

    Args:
        value: The tensor, any dtype of floats.
        odd: Whether the copy begins at an odd number of values, so that it is aligned to none but its own size.
    """
    room = value.new_full((value.numel() + 2 * _WALL + 1,), math.nan)
    inside = room[_WALL + odd :][: value.numel()].view(value.shape)
    return inside.copy_(value)


def laid_out(value: Tensor, form: str) -> Tensor:
    """Return a copy of a tensor [T, B, I] that lies in memory in one of the forms of `Setting.x`.

    Args:
        value: The tensor.
        form: The form. "one row" repeats the first row of the batch.
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

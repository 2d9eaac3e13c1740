"""In which form a layer is computed: which axis is contiguous, and how the recurrent products are cut."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

THREADS = 128  # of a block, as in place.cuh
_VECTOR_BYTES = 16
_ENOUGH_THREADS = 512  # of a multiprocessor; measured on an H200


class Allocator(Protocol):
    """What has memory for tensors: a tensor, or a recorder."""

    def new_empty(self, *shape: Any, dtype: torch.dtype) -> Tensor:
        """Return an unwritten tensor."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A form of the recurrent products.

    Attributes:
        column_major: Whether states are [H, B] and the products `W h`, with the batch contiguous, instead of [B, H] and
            `h W^T`.
        turned_forward: Whether the forward pass multiplies with a transposed copy of the recurrent weights.
        turned_backward: Whether the backward pass does.
        parts: Products that the backward pass makes of a step, side by side: 1, or one for each gate, which the
            element-wise launch adds up.
    """

    column_major: bool = False
    turned_forward: bool = False
    turned_backward: bool = False
    parts: int = 1

    def __str__(self) -> str:
        """Name the form in a few words."""
        order = "column-major products W h" if self.column_major else "row-major products h W^T"
        return order + (", backward in one product a gate" if self.parts > 1 else "")

    def planes(self, memory: Allocator, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an unwritten tensor [..., B, N] whose planes lie in this form."""
        if not self.column_major:
            return memory.new_empty(*shape, dtype=dtype)
        *others, rows, units = shape
        return memory.new_empty(*others, units, rows, dtype=dtype).transpose(-1, -2)

    def sequence(self, like: Tensor, directions: int, time: int, batch: int, units: int) -> Tensor:
        """Return an unwritten tensor [D, T, B, N]; a direction's steps form one matrix [T * B, N], or its transpose."""
        if not self.column_major:
            return like.new_empty(directions, time, batch, units)
        return like.new_empty(directions, units, time, batch).permute(0, 2, 3, 1)

    def arranged(self, planes: Tensor) -> Tensor:
        """Return a tensor [..., B, N] of the same values that the element-wise launches can read."""
        swapped = planes.transpose(-1, -2) if self.column_major else planes
        swapped = swapped.contiguous()
        swapped = swapped if swapped.data_ptr() % _VECTOR_BYTES == 0 else swapped.clone()
        return swapped.transpose(-1, -2) if self.column_major else swapped

    def outer(self, planes: Tensor) -> int:
        """Return the stride of the axis that is not contiguous in a tensor [..., B, N]."""
        return planes.stride(-1) if self.column_major else planes.stride(-2)

    def axes(self, batch: int, units: int) -> tuple[int, int]:
        """Return the sizes of the outer and the contiguous axis of a plane."""
        return (units, batch) if self.column_major else (batch, units)


class Cut(NamedTuple):
    """How an element-wise launch is cut into threads.

    Attributes:
        width: Neighbouring numbers of a thread.
        lanes: Threads of a block along the contiguous axis.
        grid: Blocks along the outer axis, the contiguous axis, and directions.
    """

    width: int
    lanes: int
    grid: tuple[int, int, int]


def cut(outer: int, inner: int, directions: int, element_bytes: int, multiprocessors: int) -> Cut:
    """Return the widest loads that still give every multiprocessor threads enough to hide their latency.

    Args:
        outer: Size of the outer axis.
        inner: Size of the contiguous axis; the width divides it.
        directions: D.
        element_bytes: Of a number in memory.
        multiprocessors: Of the device.
    """
    width = math.gcd(inner, _VECTOR_BYTES // element_bytes)
    narrowest = max(1, 4 // element_bytes)
    while width > narrowest and directions * outer * inner < width * _ENOUGH_THREADS * multiprocessors:
        width //= 2
    lanes = min(THREADS, 1 << (inner // width - 1).bit_length())
    return Cut(width, lanes, (-(-outer * lanes // THREADS), -(-inner // (width * lanes)), directions))

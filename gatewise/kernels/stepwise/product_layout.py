"""The memory layout of a layer's states, the form of its recurrent matrix products, and the tiling of its launches."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.kernels.cuda.scratch import Allocator

THREADS = 128  # threads per block, as in place.cuh
_VECTOR_BYTES = 16
_MOST_THREADS_OF_ROW = 512  # of which each has 128 registers
_ENOUGH_THREADS = 512  # threads per multiprocessor that hide the latency of loads; measured on an H200


@dataclasses.dataclass(frozen=True, slots=True)
class ProductLayout:
    """The memory layout of the states and the form of the recurrent matrix products.

    Attributes:
        column_major: Whether states are stored as [H, B] with the batch contiguous, and the products are `W h`;
            otherwise states are [B, H] and the products are `h W^T`.
        transposed_forward: Whether the forward pass multiplies by a transposed copy of the recurrent weights.
        transposed_backward: Whether the backward pass multiplies by a transposed copy of the recurrent weights.
        split_k: The number of batched products into which the backward product of a step is split along its inner
            dimension (split-K): 1, or one for each gate. The element-wise kernel adds their results.
    """

    column_major: bool = False
    transposed_forward: bool = False
    transposed_backward: bool = False
    split_k: int = 1

    def __str__(self) -> str:
        """Return a short description."""
        order = "column-major products W h" if self.column_major else "row-major products h W^T"
        return order + (", backward in one product per gate" if self.split_k > 1 else "")

    def planes(self, memory: Allocator, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor [..., B, N] whose last two axes are stored in this layout."""
        if not self.column_major:
            return memory.new_empty(*shape, dtype=dtype)
        *others, rows, units = shape
        return memory.new_empty(*others, units, rows, dtype=dtype).transpose(-1, -2)

    def sequence(self, like: Tensor, directions: int, time: int, batch: int, units: int) -> Tensor:
        """Return an uninitialized tensor [D, T, B, N] for all steps.

        The steps of a direction can be viewed as one matrix [T * B, N]; in column-major layout it is stored transposed.
        """
        if not self.column_major:
            return like.new_empty(directions, time, batch, units)
        return like.new_empty(directions, units, time, batch).permute(0, 2, 3, 1)

    def arranged(self, planes: Tensor) -> Tensor:
        """Return a tensor [..., B, N] in this layout and aligned for vector loads; copy it only if necessary."""
        swapped = planes.transpose(-1, -2) if self.column_major else planes
        swapped = swapped.contiguous()
        swapped = swapped if swapped.data_ptr() % _VECTOR_BYTES == 0 else swapped.clone()
        return swapped.transpose(-1, -2) if self.column_major else swapped

    def outer(self, planes: Tensor) -> int:
        """Return the stride of the non-contiguous one of the last two axes of a tensor [..., B, N]."""
        return planes.stride(-1) if self.column_major else planes.stride(-2)

    def axes(self, batch: int, units: int) -> tuple[int, int]:
        """Return the size of the outer (non-contiguous) axis and of the inner (contiguous) axis."""
        return (units, batch) if self.column_major else (batch, units)


MOST_UNITS_OF_ROW = 6 * _MOST_THREADS_OF_ROW
"""The largest number of hidden units for which one block computes a batch row: the largest build that GPU tests run."""


def row_tiling(units: int) -> tuple[int, int]:
    """Return the number of threads of a block that computes a batch row, and the number of units of a thread."""
    each = -(-units // _MOST_THREADS_OF_ROW)
    threads = max(32, 1 << (-(-units // each) - 1).bit_length())
    return threads, each


class Tiling(NamedTuple):
    """The division of an element-wise launch into blocks and threads.

    Attributes:
        width: The number of consecutive elements that a thread computes.
        lanes: The number of threads of a block along the inner axis.
        grid: The numbers of blocks along the outer axis, the inner axis, and the directions.
    """

    width: int
    lanes: int
    grid: tuple[int, int, int]


def tiling(outer: int, inner: int, directions: int, element_bytes: int, multiprocessors: int) -> Tiling:
    """Return the tiling with the widest loads for which every multiprocessor has enough threads to hide their latency.

    Args:
        outer: The size of the outer axis.
        inner: The size of the inner axis, which is a multiple of the width.
        directions: The number of directions.
        element_bytes: The size of an element in bytes.
        multiprocessors: The number of multiprocessors of the device.
    """
    width = math.gcd(inner, _VECTOR_BYTES // element_bytes)
    narrowest = max(1, 4 // element_bytes)
    while width > narrowest and directions * outer * inner < width * _ENOUGH_THREADS * multiprocessors:
        width //= 2
    lanes = min(THREADS, 1 << (inner // width - 1).bit_length())
    return Tiling(width, lanes, (-(-outer * lanes // THREADS), -(-inner // (width * lanes)), directions))

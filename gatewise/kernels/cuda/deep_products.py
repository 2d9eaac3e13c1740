"""Products in 16 bits over many tokens, which cuBLAS does not always make to the end.

Where the tiles of a product are fewer than the multiprocessors, cuBLAS divides its depth, in blocks of 64 terms, into
parts of equal length. Where one block is left over it can be left out: with 1,441 steps of 8 rows the gradient of the
weights lacked 8 of 11,528 terms and was 4 percent wrong. `benchmarks/deep_products.py` looks for such products; in all
that it found on an H100 and an H200 (cuBLAS of CUDA 13.0) the number of blocks less one was a multiple of a number of
parts for whose tiles the GPU has room. So a product of such a depth is made in two: first the last terms, whose
rounding is small beside the whole, then those before, in a number of blocks that no number of parts divides with one
left over.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from gatewise.contract.device import Device

BLOCK = 64  # terms
DEEP = 2048  # terms; no shallower product has been seen to be wrong
_TILE = 256  # rows and columns of the largest tile
_LEAST_BLOCKS = 8  # of a part; 24 is the least that has been seen


@functools.lru_cache(maxsize=4096)
def depths(rows: int, depth: int, columns: int, multiprocessors: int) -> tuple[int, ...]:
    """Return the depths of products that the library makes whole and that add up to one in 16 bits, the last one first.

    Args:
        rows: Of the result.
        depth: The number of terms of each value.
        columns: Of the result.
        multiprocessors: The GPU's number of multiprocessors.
    """
    if depth < DEEP:
        return (depth,)
    most = multiprocessors // (math.ceil(rows / _TILE) * math.ceil(columns / _TILE))
    if _is_whole(math.ceil(depth / BLOCK), most):
        return (depth,)
    blocks = depth // BLOCK
    while not _is_whole(blocks, most):
        blocks -= 1
    rest = depth - blocks * BLOCK
    return (*(depths(rows, rest, columns, multiprocessors) if rest else ()), blocks * BLOCK)


def _is_whole(blocks: int, most: int) -> bool:
    return all((blocks - 1) % parts for parts in range(2, min(most, (blocks - 1) // _LEAST_BLOCKS) + 1))


def parts(left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return factors whose products add up to that of two matrices, each of which the library makes whole.

    Args:
        left: [..., M, K].
        right: [..., K, N].
    """
    if left.element_size() != 2 or left.device.type != "cuda":
        return [(left, right)]
    multiprocessors = Device.probe(left.device).multiprocessors
    found, end = [], left.shape[-1]
    for depth in depths(left.shape[-2], end, right.shape[-1], multiprocessors):
        found.append((left[..., end - depth : end], right[..., end - depth : end, :]))
        end -= depth
    return found


def mm(left: Tensor, right: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return the product of two matrices [M, K] and [K, N], plus a bias [N] if any, in `out` if it is given."""
    first, *others = parts(left, right)
    out = torch.mm(*first, out=out) if bias is None else torch.addmm(bias, *first, out=out)
    for factors in others:
        out.addmm_(*factors)
    return out


def addmm(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices to `out`."""
    for factors in parts(left, right):
        out.addmm_(*factors)


def bmm(left: Tensor, right: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write the products of two batches of matrices to `out`, or add them to it."""
    for number, factors in enumerate(parts(left, right)):
        if adds or number:
            out.baddbmm_(*factors)
        else:
            torch.bmm(*factors, out=out)

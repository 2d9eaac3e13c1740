"""Products in 16 bits over many tokens, which cuBLAS does not always make to the end.

Where cuBLAS 12 and 13 divide the depth of a product among blocks, they can leave out what remains of the depth after
whole blocks. On an H200 the gradient [256, 64] of recurrent weights over 1,441 steps of 8 rows, one product of 11,528
terms, came out wrong by 1 to 8 percent in float16 and bfloat16 alike, as if the last step were missing; in two
products, of 11,520 and of 8 terms, it was as exact as cuDNN's. (cuDNN makes the gradient of input weights in one.) So a
product that is deep, of few tiles and not of whole blocks is made in two parts: first what remains, whose rounding is
small beside the whole, then whole blocks, which are added to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK = 128  # terms; cuBLAS takes blocks of 64 or of 128
_DEEP = 2048  # terms from which it may divide them
_TILE, _MANY_TILES = 128, 132  # rows and columns of a tile; with as many tiles as multiprocessors nothing is divided


def parts(left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return factors whose products add up to that of two matrices, each of which the library makes whole.

    Args:
        left: [..., M, K].
        right: [..., K, N].
    """
    depth = left.shape[-1]
    rest = depth % _BLOCK
    tiles = math.ceil(left.shape[-2] / _TILE) * math.ceil(right.shape[-1] / _TILE)
    if left.element_size() != 2 or depth < _DEEP or not rest or tiles >= _MANY_TILES:
        return [(left, right)]
    whole = depth - rest
    return [(left[..., whole:], right[..., whole:, :]), (left[..., :whole], right[..., :whole, :])]


def mm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the product of two matrices [M, K] and [K, N], in `out` if it is given."""
    first, *others = parts(left, right)
    out = torch.mm(*first) if out is None else torch.mm(*first, out=out)
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

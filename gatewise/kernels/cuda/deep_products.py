"""Products in 16 bits over many tokens, which cuBLAS does not always make to the end.

Where cuBLAS 12 and 13 divide the depth of a product among blocks, they can leave out what remains of the depth after
whole blocks. A trial on an H100 over 1,441 steps of 8 rows (the failure in `benchmarks/results/trials.jsonl`) had
gradients of weights that were 4 percent wrong, as if the last step of 8 terms were missing from one product of 11,528;
where another kernel made it in two, of 11,520 and of 8 terms, it was right. So a product that is deep, of few tiles and
not of whole blocks is made in two parts: first what remains, whose rounding is small beside the whole, then whole
blocks, which are added to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK = 128  # terms; cuBLAS takes blocks of 64 or of 128
_DEEP = 2048  # terms from which it may divide them
_TILE = 128  # rows and columns of a tile
_MANY_TILES = 256  # with more tiles than a GPU has multiprocessors nothing is divided


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

"""Float32 products of great depth, added up no less exactly than nn.LSTM's.

The library adds up the depth of a product in one register, or in several where its tiles alone would not keep the
device busy. Errors grow with the root of the terms in a register, so a product is made in stretches of its depth, each
added to the last. What the library does by itself is read off errors of cuBLAS 13 on an H200.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

Factors = tuple[Tensor, Tensor]

_TILE = 128  # rows and columns of what a block of the library's makes
_LEAST, _MOST = 512, 4096
_FULL = 0.9  # of the multiprocessors


def in_stretches(
    products: Sequence[Factors], multiprocessors: int, *, of_full: int = 1, cuts: Sequence[float] = (1 / 2,)
) -> list[Factors]:
    """Return products whose sum is that of `products`, those of great depth in stretches.

    Args:
        products: Factors [rows, depth] and [depth, columns].
        multiprocessors: Of the device.
        of_full: Stretches of products of 512 to 4096 terms whose tiles keep the device busy: the library makes one
            stretch of them.
        cuts: Where products of more than 4096 terms are cut, as shares of their depth.
    """
    found: list[Factors] = []
    for left, right in products:
        depth = left.shape[1]
        tiles = math.ceil(left.shape[0] / _TILE) * math.ceil(right.shape[1] / _TILE)
        shares: Sequence[float] = ()
        if depth > _MOST:
            # With more tiles the library may do in half the depth without the registers that it takes for the whole.
            shares = cuts if tiles <= multiprocessors else ()
        elif depth >= _LEAST and tiles >= _FULL * multiprocessors:
            shares = [part / of_full for part in range(1, of_full)]
        ends = [0, *[int(depth * share) // 8 * 8 for share in shares], depth]
        found += [
            (left[:, start:end], right[start:end]) if shares else (left, right)
            for start, end in itertools.pairwise(ends)
        ]
    return found

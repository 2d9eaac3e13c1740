"""Split long sums in float32 matrix products, so that cuBLAS computes them as accurately as `nn.LSTM`.

cuBLAS accumulates the terms of each element (the depth of the product) in one register, or in several (split-K) if the
product has too few tiles to occupy the device. The rounding error grows with the square root of the number of terms per
register. A product is therefore split along its inner dimension into several products (stretches), each of which is
added to the sum of those before. The rules below follow from errors of cuBLAS 13 measured on an H200.
(`deep_products` splits 16-bit products, because of a bug.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

Factors = tuple[Tensor, Tensor]

_TILE = 128  # rows and columns of cuBLAS's tiles
_LEAST, _MOST = 512, 4096
_FULL = 0.9  # tiles per multiprocessor from which cuBLAS does not use split-K


def in_stretches(
    products: Sequence[Factors], multiprocessors: int, *, of_full: int = 1, cuts: Sequence[float] = (1 / 2,)
) -> list[Factors]:
    """Split products of large depth; the sum of the returned products is the sum of the given ones.

    Args:
        products: Pairs of matrices [rows, depth] and [depth, columns].
        multiprocessors: The number of multiprocessors of the device.
        of_full: The number of stretches for a product of 512 to 4096 terms with enough tiles to occupy the device, for
            which cuBLAS uses a single register per element.
        cuts: The positions at which a product of more than 4096 terms is split, as fractions of its depth.
    """
    found: list[Factors] = []
    for left, right in products:
        depth = left.shape[1]
        tiles = math.ceil(left.shape[0] / _TILE) * math.ceil(right.shape[1] / _TILE)
        shares: Sequence[float] = ()
        if depth > _MOST:
            # With more tiles, cuBLAS may use fewer registers per element for half the depth than for the whole depth.
            shares = cuts if tiles <= multiprocessors else ()
        elif depth >= _LEAST and tiles >= _FULL * multiprocessors:
            shares = [part / of_full for part in range(1, of_full)]
        ends = [0, *[int(depth * share) // 8 * 8 for share in shares], depth]
        found += [
            (left[:, start:end], right[start:end]) if shares else (left, right)
            for start, end in itertools.pairwise(ends)
        ]
    return found

"""Matrix products that avoid a bug of cuBLAS, which omits terms of long sums in 16-bit formats.

The depth K of a product is the size of its inner dimension, for weight gradients the number of tokens. If a product has
fewer tiles than the GPU has multiprocessors, cuBLAS splits its depth (split-K), in blocks of 64 terms, into parts of
equal length. If one block remains, cuBLAS may omit it: with 1,441 steps of 8 sequences, the weight gradient lacked 8 of
11,528 terms and was wrong by 4 percent. `benchmarks/deep_products.py` searches for such products. In all that it found
on an H100 and an H200 (cuBLAS of CUDA 13.0), the number of blocks minus one was a multiple of a number of parts whose
tiles fit on the GPU at once. A product of such a depth is therefore computed as two: first the last terms, whose
rounding error is small compared to the result, then the others, in a number of blocks that leaves no remainder of one
for any number of parts. (`long_products` splits float32 products, for their accuracy.)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.kernels.cuda.few_rows import is_faster_with_zeros, zeros_for
from gatewise.kernels.cuda.scratch import Allocator

BLOCK = 64  # terms per block of cuBLAS
DEEP = 2048  # terms; no product of smaller depth was found to be wrong
_TILE = 256  # rows and columns of cuBLAS's largest tile
_LEAST_BLOCKS = 8  # blocks per part; the smallest number that was observed is 24


@functools.lru_cache(maxsize=4096)
def depths(rows: int, depth: int, columns: int, multiprocessors: int) -> tuple[int, ...]:
    """Return the depths into which a 16-bit product is split so that cuBLAS omits no terms, the last terms first.

    Args:
        rows: The number of rows of the result.
        depth: The number of terms of each element of the result.
        columns: The number of columns of the result.
        multiprocessors: The number of multiprocessors of the GPU.
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
    """Split the product of two matrices along its inner dimension so that cuBLAS omits no terms.

    Args:
        left: The left matrix [..., M, K].
        right: The right matrix [..., K, N].

    Returns:
        Pairs of matrices; the sum of their products is the product of the two matrices.
    """
    if left.element_size() != 2 or left.device.type != "cuda":
        return [(left, right)]
    multiprocessors = Device.probe(left.device).multiprocessors
    found, end = [], left.shape[-1]
    for depth in depths(left.shape[-2], end, right.shape[-1], multiprocessors):
        found.append((left[..., end - depth : end], right[..., end - depth : end, :]))
        end -= depth
    return found


def mm(
    left: Tensor,
    right: Tensor,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    memory: Allocator | None = None,
) -> Tensor:
    """Return the product of two matrices [M, K] and [K, N], plus an optional bias [N], in `out` if it is given.

    Args:
        left: The left factor.
        right: The right factor.
        out: The tensor for the product. On a GPU it may be float32 and the matrices 16-bit, if PyTorch `widens`; the
            bias is then None.
        bias: The bias.
        memory: The memory for the zeros by which exact products of a few rows into `out` take less time (`few_rows`);
            None for other products.
    """
    first, *others = parts(left, right)
    if memory is not None and out is not None and bias is None and is_faster_with_zeros(left, out):
        bias = zeros_for(out, memory)
    if out is not None and out.dtype != left.dtype:
        torch.mm(*first, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
    else:
        out = torch.mm(*first, out=out) if bias is None else torch.addmm(bias, *first, out=out)
    for factors in others:
        _add(out, *factors)
    return out


def addmm(out: Tensor, left: Tensor, right: Tensor, memory: Allocator | None = None) -> None:
    """Add the product of two matrices to `out`, which may be float32 as in `mm`; `memory` is as in `mm`."""
    if memory is not None and is_faster_with_zeros(left, out):
        out.add_(mm(left, right, memory.new_empty(*out.shape, dtype=out.dtype), memory=memory))
        return
    for factors in parts(left, right):
        _add(out, *factors)


def _add(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]


@functools.cache
def widens() -> bool:
    """Return whether PyTorch's products on a GPU can have a wider result dtype, as they can from version 2.8 on."""
    return any("out_dtype" in str(schema) for schema in torch._C._jit_get_schemas_for_operator("aten::mm"))


def bmm(left: Tensor, right: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write the products of two batches of matrices to `out`, or add them to it if `adds` is true.

    `out` may be float32 as in `mm`.
    """
    wide: dict[str, Any] = {} if out.dtype == left.dtype else {"out_dtype": out.dtype}
    for number, factors in enumerate(parts(left, right)):
        if adds or number:
            torch.baddbmm(out, *factors, **wide, out=out)
        else:
            torch.bmm(*factors, **wide, out=out)

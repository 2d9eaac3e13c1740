"""Matrix products whose result may have a wider dtype than their operands."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.deep_products import widens


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write or add the product of two matrices, without rounding to the operands' dtype where PyTorch supports it.

    Args:
        left: The left operand [M, K].
        right: The right operand [K, N], of the same dtype.
        out: The tensor for the result [M, N], of that dtype or a wider one.
        add: Whether to add the product to `out`.
    """
    assert left.dtype == right.dtype
    if left.dtype == out.dtype or (left.is_cuda and out.dtype == torch.float32 and widens()):
        deep_products.addmm(out, left, right) if add else deep_products.mm(left, right, out)
        return
    first, *others = deep_products.parts(left, right)
    if others:
        multiply(*first, out, add=add)
        for factors in others:
            multiply(*factors, out, add=True)
    elif left.dtype == torch.float16:  # a product may exceed the range of float16
        multiply(left.to(out.dtype), right.to(out.dtype), out, add=add)
    elif add:
        out.add_(left @ right)
    else:
        out.copy_(left @ right)


def multiply_planes(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write a batch of products, [parts, M, K] times [parts, K, N], into `out` [parts, M, N], as `multiply` does."""
    assert left.dtype == right.dtype
    if left.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    elif left.is_cuda and out.dtype == torch.float32 and widens():
        torch.bmm(left, right, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
    else:
        torch.bmm(left.to(out.dtype), right.to(out.dtype), out=out)

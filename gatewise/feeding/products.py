"""Products whose result may be of a wider dtype than what is multiplied."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gatewise.kernels.cuda import deep_products


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write the product of two matrices, or add it to what is there; without rounding in between where PyTorch can.

    Args:
        left: [M, K].
        right: [K, N], of the same dtype.
        out: [M, N], of that dtype or a wider one.
        add: Whether to add.
    """
    assert left.dtype == right.dtype
    first, *others = deep_products.parts(left, right)
    if others:
        multiply(*first, out, add=add)
        for factors in others:
            multiply(*factors, out, add=True)
    elif left.dtype == out.dtype:
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif left.is_cuda and out.dtype == torch.float32 and widens():
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
    elif left.dtype == torch.float16:  # whose range a product may leave
        multiply(left.to(out.dtype), right.to(out.dtype), out, add=add)
    elif add:
        out.add_(left @ right)
    else:
        out.copy_(left @ right)


def multiply_planes(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the products of matrices side by side [parts, M, K] and [parts, K, N] into [parts, M, N], as `multiply`."""
    assert left.dtype == right.dtype
    if left.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    elif left.is_cuda and out.dtype == torch.float32 and widens():
        torch.bmm(left, right, out_dtype=out.dtype, out=out)  # type: ignore[call-overload]
    else:
        torch.bmm(left.to(out.dtype), right.to(out.dtype), out=out)


@functools.cache
def widens() -> bool:
    """Whether PyTorch's products can have a wider result on a GPU: from 2.8 on."""
    return any("out_dtype" in str(schema) for schema in torch._C._jit_get_schemas_for_operator("aten::mm"))

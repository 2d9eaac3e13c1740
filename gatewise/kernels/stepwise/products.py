"""Functions for the recurrent matrix products of one step, for both directions at once, and for their operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.few_rows import is_faster_with_zeros, zeros_for
from gatewise.kernels.cuda.scratch import Allocator
from gatewise.kernels.stepwise.product_layout import ProductLayout


def product(left: Tensor, right: Tensor, out: Tensor, zeros: Allocator | None = None) -> Callable[[], object]:
    """Return a function that writes the products of matrices [D, M, K] and [D, K, N] to `out` [D, M, N].

    Args:
        left: The left factors.
        right: The right factors.
        out: The tensor for the products.
        zeros: The allocator of the zeros that are added to exact products of a few rows; None for other products.
    """
    if len(left) == 1:
        a, b, c = left[0], right[0], out[0]
        if zeros is not None and is_faster_with_zeros(a, c):
            added = zeros_for(c, zeros)
            return lambda: torch.addmm(added, a, b, out=c)
        return lambda: torch.mm(a, b, out=c)
    return lambda: torch.bmm(left, right, out=out)


def forward_weights(layout: ProductLayout, weights: list[Tensor], copy_to: Allocator | None = None) -> Tensor:
    """Return the right operand of the forward products [D, R, G*H].

    Args:
        layout: The layout of the products.
        weights: The recurrent weights of each direction [G*H, R].
        copy_to: The allocator of a copy, which is then always made; None to copy only if the layout requires it.
    """
    return _operand(weights, 1, layout.transposed_forward, copy_to).transpose(1, 2)


def backward_weights(layout: ProductLayout, weights: list[Tensor], copy_to: Allocator | None = None) -> Tensor:
    """Return the right operand of the backward products [D * parts, G*H / parts, R].

    The arguments are those of `forward_weights`.
    """
    return _operand(weights, layout.split_k, layout.transposed_backward, copy_to)


def _operand(weights: list[Tensor], parts: int, transposed: bool, copy_to: Allocator | None) -> Tensor:
    gates, size = weights[0].shape
    if copy_to is None and len(weights) == 1 and not transposed:
        return weights[0].contiguous().view(parts, gates // parts, size)
    shape = (len(weights), parts, size, gates // parts) if transposed else (len(weights), parts, gates // parts, size)
    operand = (copy_to or weights[0]).new_empty(*shape, dtype=weights[0].dtype)
    operand = operand.transpose(2, 3) if transposed else operand
    for own, matrix in zip(operand, weights, strict=True):
        own.copy_(
            matrix.view(parts, gates // parts, size) if matrix.is_contiguous() else matrix.unflatten(0, (parts, -1))
        )
    return operand.flatten(0, 1)


def gradients_of_a_step(
    layout: ProductLayout, memory: Allocator, directions: int, gates: int, batch: int, size: int, dtype: torch.dtype
) -> Tensor:
    """Return an uninitialized tensor for the gradients of a step's recurrent sums [D, G, B, H].

    Its layout is such that `left_operand` is a view of it.
    """
    if layout.split_k > 1 or layout.column_major:
        return layout.planes(memory, directions, gates, batch, size, dtype=dtype)
    return memory.new_empty(directions, batch, gates, size, dtype=dtype).transpose(1, 2)


def left_operand(layout: ProductLayout, dgates: Tensor) -> Tensor:
    """Return the left operand of the backward products [D * parts, B, G*H / parts] as a view of the gradients."""
    if layout.split_k > 1:
        return dgates.flatten(0, 1)
    directions, gates, batch, size = dgates.shape
    if layout.column_major:
        return dgates.transpose(2, 3).view(directions, gates * size, batch).transpose(1, 2)
    return dgates.transpose(1, 2).view(directions, batch, gates * size)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the states that are carried between steps: float32 for 16-bit dtypes, otherwise `dtype`."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def gradients_dtype(problem: Problem) -> torch.dtype:
    """Return the dtype in which the gradients of matrices and biases are computed."""
    wide = problem.float32_gradients and problem.element_bytes == 2 and deep_products.widens()
    return torch.float32 if wide else problem.dtype

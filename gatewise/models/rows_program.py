"""A Triton kernel that copies the rows of a matrix to rows of another size, one program per row.

PyTorch's operators copy single numbers where rows have another distance and another dtype in the copy, and fill each
part of the padding in a launch of its own.
"""

# Triton's compiler would interpret annotations as types.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# Triton comes with PyTorch's builds for GPUs alone.
# pyright: reportMissingImports=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "size", "width", "source_stride", "target_stride"])
def rows_program(
    source, column, factor, target, count, size, width, source_stride, target_stride,
    SOURCE_VALUES: tl.constexpr, TARGET_VALUES: tl.constexpr, WIDENS: tl.constexpr, SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row of the copy: the row of the source, with SCALES times a factor; with WIDENS a number, and zeros."""
    row = tl.program_id(0).to(tl.int64)
    # Both distances are multiples of these numbers, so that several values can be copied at a time.
    source_row = source + row * tl.multiple_of(source_stride, SOURCE_VALUES)
    target_row = target + row * tl.multiple_of(target_stride, TARGET_VALUES)
    there = row < count
    if SCALES:
        scale = tl.load(factor).to(tl.float32)
    if WIDENS:
        last = tl.load(column + row, there, 0.0).to(tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source_row + at, there & (at < size), 0.0).to(tl.float32)
        if SCALES:
            x = x * scale
        if WIDENS:
            x = tl.where(at == size, last, x)
        tl.store(target_row + at, x.to(target.dtype.element_ty), at < width)

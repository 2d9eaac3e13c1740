"""Triton kernels that add up the gradients of the rows of a matrix that were looked up, one program per token.

PyTorch's kernel for up to 3,072 tokens goes through the tokens one after the other, with a block for 32 columns.
"""

# Triton's compiler would interpret annotations as types.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# Triton comes with PyTorch's builds for GPUs alone.
# pyright: reportMissingImports=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def order_program(tokens, order, starts, lengths, count, COMPARED: tl.constexpr):
    """Sort the tokens by number, and equal ones by their places; COMPARED tokens are compared at a time.

    `order` gets the place of this token at its position in the sorted tokens. `starts` gets the position of the first
    token with the same number, and `lengths` how many have it, or 0 if this token is not the first of them.
    """
    own = tl.program_id(0)
    token = tl.load(tokens + own)
    smaller = tl.zeros([COMPARED], tl.int32)
    earlier = tl.zeros([COMPARED], tl.int32)
    equal = tl.zeros([COMPARED], tl.int32)
    for start in range(0, count, COMPARED):
        at = start + tl.arange(0, COMPARED)
        there = at < count
        other = tl.load(tokens + at, there, 0)
        same = there & (other == token)
        smaller += (there & (other < token)).to(tl.int32)
        earlier += (same & (at < own)).to(tl.int32)
        equal += same.to(tl.int32)
    first = tl.sum(smaller, 0)
    before = tl.sum(earlier, 0)
    tl.store(order + first + before, own)
    tl.store(starts + own, first)
    tl.store(lengths + own, tl.where(before == 0, tl.sum(equal, 0), 0))


@triton.jit(do_not_specialize=["width"])
def table_program(
    tokens, gradient, order, starts, lengths, table, width, ADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write COLUMNS columns of the sum of the gradients of a token, in the program of its first occurrence.

    Sums are in float32 and in the order of the places, ADDED rows at a time.
    """
    own = tl.program_id(0)
    length = tl.load(lengths + own)
    if length > 0:
        start = tl.load(starts + own)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        there = column < width
        total = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, length, ADDED):
            at = first + tl.arange(0, ADDED)
            place = tl.load(order + start + at, at < length, 0).to(tl.int64)
            values = gradient + place[:, None] * width + column[None, :]
            total += tl.sum(tl.load(values, (at < length)[:, None] & there[None, :], 0.0).to(tl.float32), 0)
        row = table + tl.load(tokens + own).to(tl.int64) * width
        tl.store(row + column, total.to(table.dtype.element_ty), there)

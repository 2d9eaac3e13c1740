"""The softmax of a chunk of scores in Triton, one program a row: the losses, and the scores' gradient in their place.

Plain operators pass over the scores five times, and twice more in float32 for scores in 16 bits. Here a row is read
once and written once, by a program that holds it in registers; a row too long for that is read twice, in blocks.
"""

# Annotations would be read by Triton's compiler as types.
# pyright: reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN202

import triton
import triton.language as tl
from torch import Tensor

_LANE, _MOST_WARPS = 64, 32  # numbers of a row that a thread holds; a program's warps, of 32 threads each
_BLOCK, _WARPS = 2048, 8  # of a row that is read block by block


def launch(scores: Tensor, targets: Tensor, losses: Tensor, smoothing: float, *, gradient: bool) -> None:
    """Write the loss of each row, and with `gradient` the gradient of its scores over them.

    Args:
        scores: [N, V], rows of any stride; float32 or 16 bits.
        targets: int64 [N].
        losses: float32 [N].
        smoothing: Share of the target that is spread evenly over all tokens.
        gradient: Whether the scores are overwritten.
    """
    count, vocabulary = scores.shape
    block = triton.next_power_of_2(vocabulary)
    whole = block <= _LANE * 32 * _MOST_WARPS
    program, warps = (_whole_row, max(1, block // (32 * _LANE))) if whole else (_row_in_blocks, _WARPS)
    program[(count,)](
        scores, targets, losses, vocabulary, scores.stride(0), smoothing,
        SMOOTH=smoothing > 0, GRADIENT=gradient, BLOCK=block if whole else _BLOCK, num_warps=warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["V"])
def _whole_row(
    scores, targets, losses, V, stride, smoothing,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < V
    place = scores + row * stride + columns
    x = tl.load(place, there, -float("inf")).to(tl.float32)
    most = tl.max(x, 0)
    powers = tl.exp(x - most)
    log_sum = most + tl.log(tl.sum(powers, 0))
    target = tl.load(targets + row)
    even = smoothing / V
    loss = log_sum - (1.0 - smoothing) * tl.sum(tl.where(columns == target, x, 0.0), 0)
    if SMOOTH:
        loss -= even * tl.sum(tl.where(there, x, 0.0), 0)
    tl.store(losses + row, loss)
    if GRADIENT:
        gradient = tl.exp(x - log_sum) - even
        gradient = tl.where(columns == target, gradient - (1.0 - smoothing), gradient)
        tl.store(place, gradient.to(scores.dtype.element_ty), there)


@triton.jit(do_not_specialize=["V"])
def _row_in_blocks(
    scores, targets, losses, V, stride, smoothing,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = scores + row * stride
    columns = tl.arange(0, BLOCK)
    # A largest score and sums for each lane; the lanes are brought together once, at the end.
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    powers = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    of_target = tl.zeros([BLOCK], tl.float32)
    target = tl.load(targets + row)
    for start in range(0, V, BLOCK):
        there = start + columns < V
        x = tl.load(place + start + columns, there, -float("inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        # Lanes that saw no number yet: of two infinities there is no difference.
        grown = tl.where(larger == -float("inf"), 0.0, tl.exp(largest - larger))
        powers = powers * grown + tl.where(there & (x > -float("inf")) | (x != x), tl.exp(x - larger), 0.0)
        if SMOOTH:
            total += tl.where(there, x, 0.0)
        of_target += tl.where(start + columns == target, x, 0.0)
        largest = larger
    most = tl.max(largest, 0)
    sum_of_powers = tl.sum(tl.where(largest == -float("inf"), 0.0, powers * tl.exp(largest - most)), 0)
    log_sum = most + tl.log(sum_of_powers)
    even = smoothing / V
    loss = log_sum - (1.0 - smoothing) * tl.sum(of_target, 0)
    if SMOOTH:
        loss -= even * tl.sum(total, 0)
    tl.store(losses + row, loss)
    if GRADIENT:
        for start in range(0, V, BLOCK):
            there = start + columns < V
            x = tl.load(place + start + columns, there, 0.0).to(tl.float32)
            gradient = tl.exp(x - log_sum) - even
            gradient = tl.where(start + columns == target, gradient - (1.0 - smoothing), gradient)
            tl.store(place + start + columns, gradient.to(scores.dtype.element_ty), there)

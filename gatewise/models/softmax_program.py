"""A Triton kernel for the softmax of a chunk of logits, one program per row, which computes losses and gradient.

PyTorch operators read or write the logits five times, and twice more in float32 for 16-bit logits. This kernel reads a
row twice, the second time mostly from the cache, and writes it once.
"""

# Triton's compiler would interpret annotations as types.
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportIndexIssue=false
# Triton comes with PyTorch's builds for GPUs alone.
# pyright: reportMissingImports=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["V"])
def softmax_program(
    scores, targets, losses, V, stride, smoothing,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of a row and, with GRADIENT, overwrite its logits by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    place = scores + row * stride
    columns = tl.arange(0, BLOCK)
    # Maxima and sums are kept per lane; the lanes are combined once, at the end.
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    powers = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    of_target = tl.zeros([BLOCK], tl.float32)
    target = tl.load(targets + row)
    for start in range(0, V, BLOCK):
        there = start + columns < V
        x = tl.load(place + start + columns, there, -float("inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        # In lanes that have seen no number yet both maxima are -inf, whose difference would be NaN.
        grown = tl.where(larger == -float("inf"), 0.0, tl.exp(largest - larger))
        powers = powers * grown + tl.where(there & (x > -float("inf")) | (x != x), tl.exp(x - larger), 0.0)
        if SMOOTH:
            total += tl.where(there, x, 0.0)
        of_target += tl.where(start + columns == target, x, 0.0)
        largest = larger
    most = tl.max(largest, 0)
    # A lane that has seen no number has a sum of zero; one that has seen only NaN, which is no maximum, a sum of NaN.
    sum_of_powers = tl.sum(tl.where(largest == -float("inf"), powers, powers * tl.exp(largest - most)), 0)
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

"""Scores and context of all decoder steps.

The additive score is bound by its hyperbolic tangent, which is computed by the special function units: a multiprocessor
has 16 lanes of them, beside 128 for additions and multiplications. A tile [BT, BS, BH] (decoder steps, source
positions, features) is laid out with features across threads, so that every sum over steps or positions stays within a
thread, and a sum over features is computed once, at the end of its loop.
"""

# Triton's compiler would interpret annotations as types.
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportArgumentType=false
# Triton comes with PyTorch's builds for GPUs alone.
# pyright: reportMissingImports=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gatewise.attention.fused.programs.pieces import (
    KEY_REACH,
    SLOPE,
    exp2,
    key_power,
    length_of,
    product,
    query_power,
    reciprocal,
    tanh,
)


@triton.jit
def halves(
    q_row, k_row, v, step_there, position_there, H,
    BT: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """Return the sum over features of v (1 - tanh(q + k)) / 2, and the largest absolute value of a key.

    Each element takes one reciprocal. With POWERS the exponentials are computed once per query and key, otherwise once
    per element.
    """
    sums = tl.zeros([BT, BS, BH], tl.float32)
    reach = tl.zeros([1, BS, BH], tl.float32)
    for h0 in range(0, H, BH):
        h = h0 + tl.arange(0, BH)
        h_there = h < H
        q = tl.load(q_row[:, None, None] + h[None, None, :], step_there[:, None, None] & h_there[None, None, :], 0.0)
        k = tl.load(
            k_row[None, :, None] + h[None, None, :], position_there[None, :, None] & h_there[None, None, :], 0.0
        )
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        vector = tl.load(v + h, h_there, 0.0).to(tl.float32)
        if POWERS:
            power = query_power(q) * key_power(k)
            reach = tl.maximum(reach, tl.abs(k))
        else:
            power = exp2((q + k) * SLOPE)
        sums += reciprocal(1.0 + power) * vector[None, None, :]
    return tl.sum(sums, 2), tl.max(reach)


@triton.jit(do_not_specialize=["T", "B", "S"])
def score_program(
    query, keys, lengths, v, gain, shift, weights, scores, lse, statistics,
    T, B, S, H, epsilon, query_step, query_row, keys_step, keys_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr, WEIGHTS: tl.constexpr,
    HARDWARE: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a block of steps for all positions, their log-sum-exp, and optionally the weights."""
    row = tl.program_id(1).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    steps = tl.program_id(0) * BT + tl.arange(0, BT)
    step_there = steps < T
    pair_row = (steps.to(tl.int64) * B + row) * S
    q_row = query + steps.to(tl.int64) * query_step + row * query_row
    v_sum = 0.0
    if ADDITIVE and not NORM and not HARDWARE:
        sums = tl.zeros([BH], tl.float32)
        for h0 in range(0, H, BH):
            h = h0 + tl.arange(0, BH)
            sums += tl.load(v + h, h < H, 0.0).to(tl.float32)
        v_sum = tl.sum(sums, 0)
    largest = tl.full([BT], -float("inf"), tl.float32)
    total = tl.zeros([BT], tl.float32)
    for s0 in range(0, length, BS):
        positions = s0 + tl.arange(0, BS)
        position_there = positions < length
        k_row = keys + positions.to(tl.int64) * keys_step + row * keys_row
        there = step_there[:, None] & position_there[None, :]
        if ADDITIVE and not NORM and not HARDWARE:
            half, reach = halves(q_row, k_row, v, step_there, position_there, H, BT, BS, BH, True)
            if reach * SLOPE > KEY_REACH:
                half, reach = halves(q_row, k_row, v, step_there, position_there, H, BT, BS, BH, False)
            score = v_sum - 2.0 * half
        else:
            mean = tl.zeros([BT, BS], tl.float32)
            rstd = tl.zeros([BT, BS], tl.float32)
            if NORM:
                sums = tl.zeros([BT, BS, BH], tl.float32)
                for h0 in range(0, H, BH):
                    h = h0 + tl.arange(0, BH)
                    h_there = h < H
                    q = tl.load(
                        q_row[:, None, None] + h[None, None, :], step_there[:, None, None] & h_there[None, None, :], 0.0
                    )
                    k = tl.load(
                        k_row[None, :, None] + h[None, None, :],
                        position_there[None, :, None] & h_there[None, None, :],
                        0.0,
                    )
                    sums += q.to(tl.float32) + k.to(tl.float32)
                mean = tl.sum(sums, 2) / H
                sums = tl.zeros([BT, BS, BH], tl.float32)
                for h0 in range(0, H, BH):
                    h = h0 + tl.arange(0, BH)
                    h_there = h < H
                    q = tl.load(
                        q_row[:, None, None] + h[None, None, :], step_there[:, None, None] & h_there[None, None, :], 0.0
                    )
                    k = tl.load(
                        k_row[None, :, None] + h[None, None, :],
                        position_there[None, :, None] & h_there[None, None, :],
                        0.0,
                    )
                    centred = q.to(tl.float32) + k.to(tl.float32) - mean[:, :, None]
                    sums += tl.where(h_there[None, None, :], centred * centred, 0.0)
                rstd = 1.0 / tl.sqrt(tl.sum(sums, 2) / H + epsilon)
            sums = tl.zeros([BT, BS, BH], tl.float32)
            slopes = tl.zeros([BT, BS, BH], tl.float32)
            leans = tl.zeros([BT, BS, BH], tl.float32)
            for h0 in range(0, H, BH):
                h = h0 + tl.arange(0, BH)
                h_there = h < H
                q = tl.load(
                    q_row[:, None, None] + h[None, None, :], step_there[:, None, None] & h_there[None, None, :], 0.0
                )
                k = tl.load(
                    k_row[None, :, None] + h[None, None, :], position_there[None, :, None] & h_there[None, None, :], 0.0
                )
                q = q.to(tl.float32)
                k = k.to(tl.float32)
                if ADDITIVE:
                    vector = tl.load(v + h, h_there, 0.0).to(tl.float32)[None, None, :]
                    into = q + k
                    if NORM:
                        normalised = (into - mean[:, :, None]) * rstd[:, :, None]
                        gains = tl.load(gain + h, h_there, 0.0).to(tl.float32)[None, None, :]
                        into = normalised * gains + tl.load(shift + h, h_there, 0.0).to(tl.float32)[None, None, :]
                        squashed = tanh(into, HARDWARE)
                        slope = vector * gains * (1.0 - squashed * squashed)
                        slopes += slope
                        leans += slope * normalised
                    else:
                        squashed = tanh(into, HARDWARE)
                    sums += squashed * vector
                else:
                    sums += q * k
            score = tl.sum(sums, 2)
            if NORM and KEEP:
                apart = (row * 0 + B) * S
                at = statistics + pair_row[:, None] + steps.to(tl.int64)[:, None] * (3 * apart) + positions[None, :]
                tl.store(at, mean, there)
                tl.store(at + apart, rstd, there)
                tl.store(at + 2 * apart, tl.sum(slopes, 2) / H, there)
                tl.store(at + 3 * apart, tl.sum(leans, 2) / H, there)
        tl.store(scores + pair_row[:, None] + positions[None, :], score, there)
        score = tl.where(position_there[None, :], score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(score - base[:, None]), 1)
        largest = larger
    # The sum of a sequence of length 0 is zero; a NaN must remain NaN.
    normaliser = largest + tl.log(tl.where(total == 0.0, 1.0, total))
    tl.store(lse + steps.to(tl.int64) * B + row, normaliser, step_there)
    if WEIGHTS:
        tl.debug_barrier()  # the scores read below were written by other threads of this program
        for s0 in range(0, S, BS):
            positions = s0 + tl.arange(0, BS)
            within = step_there[:, None] & (positions < length)[None, :]
            at = pair_row[:, None] + positions[None, :]
            share = tl.exp(tl.load(scores + at, within, 0.0) - normaliser[:, None])
            share = tl.where(within, share, 0.0)
            there = step_there[:, None] & (positions < S)[None, :]
            tl.store(weights + at, share.to(weights.dtype.element_ty), there)


@triton.jit(do_not_specialize=["T", "B", "S"])
def context_program(
    values, lengths, scores, lse, context,
    T, B, S, V, values_step, values_row, context_step, context_row,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the context of a block of steps and columns as a matrix product on the tensor cores."""
    row = tl.program_id(2).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    steps = tl.program_id(0) * BT + tl.arange(0, BT)
    step_there = steps < T
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    column_there = columns < V
    pair_row = (steps.to(tl.int64) * B + row) * S
    normaliser = tl.load(lse + steps.to(tl.int64) * B + row, step_there, 0.0)
    sums = tl.zeros([BT, BV], tl.float32)
    for s0 in range(0, length, BS):
        positions = s0 + tl.arange(0, BS)
        position_there = positions < length
        within = step_there[:, None] & position_there[None, :]
        share = tl.exp(tl.load(scores + pair_row[:, None] + positions[None, :], within, 0.0) - normaliser[:, None])
        share = tl.where(within, share, 0.0).to(values.dtype.element_ty)
        value = tl.load(
            values + positions.to(tl.int64)[:, None] * values_step + row * values_row + columns[None, :],
            position_there[:, None] & column_there[None, :],
            0.0,
        )
        sums = product(share, value, sums, PRECISION)
    out = context + steps.to(tl.int64)[:, None] * context_step + row * context_row + columns[None, :]
    tl.store(out, sums.to(context.dtype.element_ty), step_there[:, None] & column_there[None, :])

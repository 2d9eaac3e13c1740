"""The backward pass through the softmax of all decoder steps: gradients of scores and values, on the tensor cores."""

# Triton's compiler would interpret annotations as types.
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportArgumentType=false
# Triton comes with PyTorch's builds for GPUs alone.
# pyright: reportMissingImports=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gatewise.attention.fused.programs.pieces import length_of, product


@triton.jit(do_not_specialize=["T", "B", "S"])
def score_gradient_program(
    values, lengths, scores, lse, dcontext, dweights, dscores,
    T, B, S, V, values_step, values_row, dcontext_step, dcontext_row, dweights_step, dweights_row,
    RAGGED: tl.constexpr, WEIGHTS: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the scores of a block of steps: weight * (dweight - sum of weight * dweight).

    The subtracted sum is computed from the same rounded numbers as the terms it is subtracted from. The product of the
    context and its gradient is the same sum up to rounding, but the rounding error would accumulate over positions: the
    gradient of a bias of the keys is the sum of these differences.
    """
    row = tl.program_id(1).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    steps = tl.program_id(0) * BT + tl.arange(0, BT)
    step_there = steps < T
    places = steps.to(tl.int64)
    pair_row = (places * B + row) * S
    normaliser = tl.load(lse + places * B + row, step_there, 0.0)
    mean = tl.zeros([BT], tl.float32)
    for s0 in range(0, length, BS):
        positions = s0 + tl.arange(0, BS)
        position_there = positions < length
        within = step_there[:, None] & position_there[None, :]
        above = tl.zeros([BT, BS], tl.float32)
        for c0 in range(0, V, BV):
            columns = c0 + tl.arange(0, BV)
            column_there = columns < V
            value = tl.load(
                values + positions.to(tl.int64)[None, :] * values_step + row * values_row + columns[:, None],
                position_there[None, :] & column_there[:, None],
                0.0,
            )
            given = tl.load(
                dcontext + places[:, None] * dcontext_step + row * dcontext_row + columns[None, :],
                step_there[:, None] & column_there[None, :],
                0.0,
            )
            above = product(given, value, above, PRECISION)
        if WEIGHTS:
            given = dweights + places[:, None] * dweights_step + row * dweights_row + positions[None, :]
            above += tl.load(given, within, 0.0).to(tl.float32)
        at = pair_row[:, None] + positions[None, :]
        share = tl.exp(tl.load(scores + at, within, 0.0) - normaliser[:, None])
        mean += tl.sum(tl.where(within, share * above, 0.0), 1)
        tl.store(dscores + at, above, within)
    tl.debug_barrier()  # the data read below were written by other threads of this program
    for s0 in range(0, length, BS):
        positions = s0 + tl.arange(0, BS)
        within = step_there[:, None] & (positions < length)[None, :]
        at = pair_row[:, None] + positions[None, :]
        share = tl.exp(tl.load(scores + at, within, 0.0) - normaliser[:, None])
        above = tl.load(dscores + at, within, 0.0)
        tl.store(dscores + at, share * (above - mean[:, None]), within)


@triton.jit(do_not_specialize=["T", "B", "S"])
def value_gradient_program(
    lengths, scores, lse, dcontext, dvalues,
    T, B, S, V, dcontext_step, dcontext_row,
    RAGGED: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of the values: the sum over steps of weight * dcontext."""
    row = tl.program_id(2).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    s0 = tl.program_id(0) * BS
    positions = s0 + tl.arange(0, BS)
    position_there = positions < length
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    column_there = columns < V
    found = tl.zeros([BS, BV], tl.float32)
    for t0 in range(0, tl.where(s0 < length, T, 0), BT):
        steps = t0 + tl.arange(0, BT)
        step_there = steps < T
        within = position_there[:, None] & step_there[None, :]
        at = (steps.to(tl.int64)[None, :] * B + row) * S + positions[:, None]
        normaliser = tl.load(lse + steps.to(tl.int64) * B + row, step_there, 0.0)
        share = tl.where(within, tl.exp(tl.load(scores + at, within, 0.0) - normaliser[None, :]), 0.0)
        above = tl.load(
            dcontext + steps.to(tl.int64)[:, None] * dcontext_step + row * dcontext_row + columns[None, :],
            step_there[:, None] & column_there[None, :],
            0.0,
        )
        found = product(share.to(above.dtype), above, found, PRECISION)
    out = (positions.to(tl.int64)[:, None] * B + row) * V + columns[None, :]
    there = (positions < S)[:, None] & column_there[None, :]
    found = tl.where(position_there[:, None], found, 0.0)
    if ADD:
        found += tl.load(dvalues + out, there, 0.0).to(tl.float32)
    tl.store(dvalues + out, found.to(dvalues.dtype.element_ty), there)


@triton.jit(do_not_specialize=["T", "B", "S"])
def short_gradient_program(
    values, lengths, scores, lse, dcontext, dweights, dscores, dvalues,
    T, B, S, V, values_step, values_row, dcontext_step, dcontext_row, dweights_step, dweights_row,
    RAGGED: tl.constexpr, WEIGHTS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of scores and values of a sequence whose steps and positions fit into one tile."""
    row = tl.program_id(0).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    steps = tl.arange(0, BT)
    step_there = steps < T
    places = steps.to(tl.int64)
    positions = tl.arange(0, BS)
    position_there = positions < length
    within = step_there[:, None] & position_there[None, :]
    at = ((places * B + row) * S)[:, None] + positions[None, :]
    normaliser = tl.load(lse + places * B + row, step_there, 0.0)
    share = tl.where(within, tl.exp(tl.load(scores + at, within, 0.0) - normaliser[:, None]), 0.0)
    turned = tl.trans(share).to(values.dtype.element_ty)
    above = tl.zeros([BT, BS], tl.float32)
    for c0 in range(0, V, BV):
        columns = c0 + tl.arange(0, BV)
        there = step_there[:, None] & (columns < V)[None, :]
        value = tl.load(
            values + positions.to(tl.int64)[None, :] * values_step + row * values_row + columns[:, None],
            position_there[None, :] & (columns < V)[:, None],
            0.0,
        )
        given = tl.load(dcontext + places[:, None] * dcontext_step + row * dcontext_row + columns[None, :], there, 0.0)
        above = product(given, value, above, PRECISION)
        dvalue = product(turned, given, tl.zeros([BS, BV], tl.float32), PRECISION)
        dvalue = tl.where(position_there[:, None], dvalue, 0.0)
        out = (positions.to(tl.int64)[:, None] * B + row) * V + columns[None, :]
        there = (positions < S)[:, None] & (columns < V)[None, :]
        if ADD:
            dvalue += tl.load(dvalues + out, there, 0.0).to(tl.float32)
        tl.store(dvalues + out, dvalue.to(dvalues.dtype.element_ty), there)
    if WEIGHTS:
        given_at = dweights + places[:, None] * dweights_step + row * dweights_row + positions[None, :]
        above += tl.load(given_at, within, 0.0).to(tl.float32)
    mean = tl.sum(share * tl.where(within, above, 0.0), 1)
    tl.store(dscores + at, share * (above - mean[:, None]), within)

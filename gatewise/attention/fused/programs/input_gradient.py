"""The backward pass through the scores of all decoder steps: the gradients of queries, keys and parameters.

A Triton program handles one block of features of one sequence and sums over all its steps and positions. There are no
atomic additions, so that the result is deterministic. Features lie across the lanes of a warp; handling one step at a
time leaves enough registers for the sums of a block of positions.
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
    query_power,
    reciprocal,
    tanh,
)


@triton.jit
def sweep(
    query, k, vector, gains, shifts, statistics, dscores, dquery, dquery_sums, dk, dv, dgain, dshift,
    s0, length, T, B, S, H, row, h, h_there, query_step, query_row, dquery_step, dquery_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, HARDWARE: tl.constexpr, POWERS: tl.constexpr,
    QUERY: tl.constexpr, SOURCE: tl.constexpr, SUMS: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Loop over all steps with one block of keys; return the sums for keys and parameters."""
    positions = s0 + tl.arange(0, BS)
    there = (positions < length)[None, :]
    lanes = h_there[None, None, :]
    first = tl.zeros([1, 1], tl.int32) + s0
    k_power = k
    if POWERS:
        k_power = key_power(k)
    count = tl.where(s0 < length, T, 0)
    # The data of the next step are loaded ahead: there are too few warps to hide the latency of a load.
    ahead = tl.zeros([1, 1], tl.int32)
    begun = ahead < count
    q_at = query + row * query_row + h[None, None, :]
    dscore_at = dscores + row * S + positions[None, :]
    q_next = tl.load(q_at, lanes & begun[:, :, None], 0.0)
    dscore_next = tl.load(dscore_at, there & begun, 0.0)
    for step in range(0, count):
        wide = row * 0 + step  # as a 64-bit integer
        place = wide * B + row
        q = q_next.to(tl.float32)
        dscore = dscore_next[:, :, None]
        more = ahead + (step + 1) < count
        q_next = tl.load(q_at + (wide + 1) * query_step, lanes & more[:, :, None], 0.0)
        dscore_next = tl.load(dscore_at + (wide + 1) * B * S, there & more, 0.0)
        if QUERY and SUMS:
            before = tl.load(dquery_sums + place * H + h[None, :], h_there[None, :] & (first > 0), 0.0)
        if NORM:
            at = statistics + (place + wide * (3 * B)) * S + positions[None, :]
            apart = (row * 0 + B) * S
            mean = tl.load(at, there, 0.0)[:, :, None]
            rstd = tl.load(at + apart, there, 0.0)[:, :, None]
            slope_mean = tl.load(at + 2 * apart, there, 0.0)[:, :, None]
            lean_mean = tl.load(at + 3 * apart, there, 0.0)[:, :, None]
            normalised = (q + k - mean) * rstd
            squashed = tanh(normalised * gains[None, None, :] + shifts[None, None, :], HARDWARE)
            slope = vector[None, None, :] * (1.0 - squashed * squashed)
            if SOURCE:
                dv += tl.sum(dscore * squashed, 1)
                dshift += tl.sum(dscore * slope, 1)
                dgain += tl.sum(dscore * slope * normalised, 1)
            found = dscore * rstd * (slope * gains[None, None, :] - slope_mean - normalised * lean_mean)
        elif ADDITIVE and HARDWARE:
            squashed = tanh(q + k, HARDWARE)
            scaled = dscore * squashed
            if SOURCE:
                dv += tl.sum(scaled, 1)
            found = dscore - scaled * squashed
        elif ADDITIVE:
            power = query_power(q) * k_power if POWERS else exp2((q + k) * SLOPE)
            squashed = 1.0 - 2.0 * reciprocal(1.0 + power)
            scaled = dscore * squashed
            if SOURCE:
                dv += tl.sum(scaled, 1)
            found = dscore - scaled * squashed
        else:
            found = dscore * q
        if SOURCE:
            dk += tl.sum(found, 0)
        if QUERY:
            if not ADDITIVE:
                found = dscore * k
            dq = tl.sum(found, 1)
            if ADDITIVE and not NORM:
                dq = dq * vector[None, :]
            done = h_there[None, :]
            if SUMS:  # the source has more than one block of positions, and the sum over blocks is kept in memory
                dq += before
                tl.store(dquery_sums + place * H + h[None, :], dq, done & (first + BS < length))
                done = done & (first + BS >= length)
            out = dquery + wide * dquery_step + row * dquery_row + h[None, :]
            tl.store(out, dq.to(dquery.dtype.element_ty), done)
    return dk, dv, dgain, dshift


@triton.jit(do_not_specialize=["T", "B", "S"])
def input_gradient_program(
    query, keys, lengths, v, gain, shift, statistics, dscores,
    dquery, dquery_sums, dkeys, parameters,
    T, B, S, H, query_step, query_row, keys_step, keys_row, dquery_step, dquery_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, RAGGED: tl.constexpr, HARDWARE: tl.constexpr,
    QUERY: tl.constexpr, SOURCE: tl.constexpr, ADD: tl.constexpr, SUMS: tl.constexpr,
    BS: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, keys and parameters for a block of features."""
    row = tl.program_id(1).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    # The contiguity hint is 1, so that a warp's lanes lie along the features whatever the width of an element.
    h = tl.max_contiguous(tl.program_id(0) * BH + tl.arange(0, BH), 1)
    h_there = h < H
    vector = tl.zeros([BH], tl.float32)
    gains = tl.zeros([BH], tl.float32)
    shifts = tl.zeros([BH], tl.float32)
    if ADDITIVE:
        vector = tl.load(v + h, h_there, 0.0).to(tl.float32)
    if NORM:
        gains = tl.load(gain + h, h_there, 0.0).to(tl.float32)
        shifts = tl.load(shift + h, h_there, 0.0).to(tl.float32)
    dv = tl.zeros([1, BH], tl.float32)
    dgain = tl.zeros([1, BH], tl.float32)
    dshift = tl.zeros([1, BH], tl.float32)
    for s0 in range(0, S if SOURCE else length, BS):
        positions = s0 + tl.arange(0, BS)
        position_there = positions < length
        k_at = keys + positions.to(tl.int64)[None, :, None] * keys_step + row * keys_row + h[None, None, :]
        k = tl.load(k_at, position_there[None, :, None] & h_there[None, None, :], 0.0).to(tl.float32)
        dk = tl.zeros([BS, BH], tl.float32)
        if ADDITIVE and not NORM and not HARDWARE:
            if tl.max(tl.abs(k)) * SLOPE > KEY_REACH:
                dk, dv, dgain, dshift = sweep(
                    query, k, vector, gains, shifts, statistics, dscores, dquery, dquery_sums, dk, dv, dgain, dshift,
                    s0, length, T, B, S, H, row, h, h_there, query_step, query_row, dquery_step, dquery_row,
                    ADDITIVE, NORM, HARDWARE, False, QUERY, SOURCE, SUMS, BS,
                )  # fmt: skip
            else:
                dk, dv, dgain, dshift = sweep(
                    query, k, vector, gains, shifts, statistics, dscores, dquery, dquery_sums, dk, dv, dgain, dshift,
                    s0, length, T, B, S, H, row, h, h_there, query_step, query_row, dquery_step, dquery_row,
                    ADDITIVE, NORM, HARDWARE, True, QUERY, SOURCE, SUMS, BS,
                )  # fmt: skip
        else:
            dk, dv, dgain, dshift = sweep(
                query, k, vector, gains, shifts, statistics, dscores, dquery, dquery_sums, dk, dv, dgain, dshift,
                s0, length, T, B, S, H, row, h, h_there, query_step, query_row, dquery_step, dquery_row,
                ADDITIVE, NORM, HARDWARE, False, QUERY, SOURCE, SUMS, BS,
            )  # fmt: skip
        if SOURCE:
            if ADDITIVE and not NORM:
                dk = dk * vector[None, :]
            # A NaN in a query must not reach the gradient of a masked key.
            dk = tl.where(position_there[:, None], dk, 0.0)
            out = (positions.to(tl.int64)[:, None] * B + row) * H + h[None, :]
            there = (positions < S)[:, None] & h_there[None, :]
            if ADD:
                dk += tl.load(dkeys + out, there, 0.0).to(tl.float32)
            tl.store(dkeys + out, dk.to(dkeys.dtype.element_ty), there)
        tl.debug_barrier()  # the query's partial sums are read in the next iteration
    if QUERY:
        for step in range(0, tl.where(length == 0, T, 0)):
            out = dquery + (row * 0 + step) * dquery_step + row * dquery_row + h
            tl.store(out, tl.zeros([BH], tl.float32).to(dquery.dtype.element_ty), h_there)
    if SOURCE and ADDITIVE:
        tl.store(parameters + row * H + h[None, :], dv, h_there[None, :])
    if SOURCE and NORM:
        tl.store(parameters + (B + row) * H + h[None, :], dgain, h_there[None, :])
        tl.store(parameters + (2 * B + row) * H + h[None, :], dshift, h_there[None, :])


@triton.jit(do_not_specialize=["B"])
def parameter_gradient_program(
    parameters, dv, dgain, dshift, B, H,
    NORM: tl.constexpr, ADD: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of one parameter over sequences, for a block of features."""
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    which = tl.program_id(1)
    sums = tl.zeros([BB, BH], tl.float32)
    for b0 in range(0, B, BB):
        rows = b0 + tl.arange(0, BB)
        at = parameters + (which * B + rows).to(tl.int64)[:, None] * H + h[None, :]
        sums += tl.load(at, (rows < B)[:, None] & (h < H)[None, :], 0.0)
    out = dv
    if NORM:
        if which == 1:
            out = dgain
        if which == 2:
            out = dshift
    total = tl.sum(sums, 0)
    if ADD:
        total += tl.load(out + h, h < H, 0.0).to(tl.float32)
    tl.store(out + h, total.to(dv.dtype.element_ty), h < H)

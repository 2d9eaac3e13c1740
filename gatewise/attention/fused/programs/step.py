"""One decoder step: a program for each sequence, which reads keys and values once, whole positions at a time.

At one step nothing can be shared between steps, so that reading keys and values is most of the work: a block of
positions [BS, BH] with all their features, and their values [BS, BV], are on their way while the block before is
computed.
"""

# Annotations would be read by Triton's compiler as types.
# pyright: reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gatewise.attention.fused.programs.pieces import length_of, tanh


@triton.jit(do_not_specialize=["S"])
def step_program(
    query, keys, values, lengths, v, gain, shift, context, weights, scores, lse, statistics,
    B, S, H, V, epsilon,
    query_step, query_row, keys_step, keys_row, values_step, values_row, context_step, context_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr, WEIGHTS: tl.constexpr,
    HARDWARE: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The context of one step and sequence: scores, their softmax as it grows, and the sum of values."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    h = tl.arange(0, BH)
    h_there = h < H
    columns = tl.arange(0, BV)
    column_there = columns < V
    q = tl.load(query + step * query_step + row * query_row + h, h_there, 0.0).to(tl.float32)
    if ADDITIVE:
        vector = tl.load(v + h, h_there, 0.0).to(tl.float32)
    if NORM:
        gains = tl.load(gain + h, h_there, 0.0).to(tl.float32)
        shifts = tl.load(shift + h, h_there, 0.0).to(tl.float32)
    pair_row = (step * B + row) * S
    largest = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    found = tl.zeros([BS, BV], tl.float32)
    for s0 in tl.range(0, length, BS, num_stages=STAGES):
        positions = s0 + tl.arange(0, BS)
        there = positions < length
        places = positions.to(tl.int64)[:, None]
        k = tl.load(keys + places * keys_step + row * keys_row + h[None, :], there[:, None] & h_there[None, :], 0.0).to(
            tl.float32
        )
        value = tl.load(
            values + places * values_step + row * values_row + columns[None, :],
            there[:, None] & column_there[None, :],
            0.0,
        ).to(tl.float32)
        if NORM:
            total_in = q[None, :] + k
            mean = tl.sum(total_in, 1) / H
            centred = tl.where(h_there[None, :], total_in - mean[:, None], 0.0)
            rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / H + epsilon)
            normalised = centred * rstd[:, None]
            squashed = tanh(normalised * gains[None, :] + shifts[None, :], HARDWARE)
            score = tl.sum(squashed * vector[None, :], 1)
            if KEEP:
                slope = vector[None, :] * gains[None, :] * (1.0 - squashed * squashed)
                at = statistics + (step * 4 * B + row) * S + positions
                apart = (row * 0 + B) * S
                tl.store(at, mean, there)
                tl.store(at + apart, rstd, there)
                tl.store(at + 2 * apart, tl.sum(slope, 1) / H, there)
                tl.store(at + 3 * apart, tl.sum(slope * normalised, 1) / H, there)
        elif ADDITIVE:
            score = tl.sum(tanh(q[None, :] + k, HARDWARE) * vector[None, :], 1)
        else:
            score = tl.sum(q[None, :] * k, 1)
        if KEEP or WEIGHTS:
            tl.store(scores + pair_row + positions, score, there)
        score = tl.where(there, score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, 0))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        shrunk = tl.exp(largest - base)
        share = tl.exp(score - base)
        total = total * shrunk + tl.sum(share, 0)
        found = found * shrunk + share[:, None] * value
        largest = larger
    # Of a sequence without source the sum is zero; a NaN must stay one.
    total = tl.where(total == 0.0, 1.0, total)
    normaliser = largest + tl.log(total)
    if KEEP:
        tl.store(lse + step * B + row, normaliser)
    out = context + step * context_step + row * context_row + columns
    tl.store(out, (tl.sum(found, 0) / total).to(context.dtype.element_ty), column_there)
    if WEIGHTS:
        tl.debug_barrier()  # other threads of this program wrote the scores that are read now
        for s0 in range(0, S, BS):
            positions = s0 + tl.arange(0, BS)
            there = positions < length
            share = tl.exp(tl.load(scores + pair_row + positions, there, 0.0) - normaliser)
            share = tl.where(there, share, 0.0)
            tl.store(weights + pair_row + positions, share.to(weights.dtype.element_ty), positions < S)


@triton.jit(do_not_specialize=["S"])
def step_gradient_program(
    query, keys, values, lengths, v, gain, shift, scores, lse, statistics, context, dcontext, dweights,
    dquery, dkeys, dvalues, parameters,
    B, S, H, V,
    query_row, keys_step, keys_row, values_step, values_row, context_row, dcontext_row, dweights_row, dquery_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, RAGGED: tl.constexpr, WEIGHTS: tl.constexpr, QUERY: tl.constexpr,
    SOURCE: tl.constexpr, ADD: tl.constexpr, HARDWARE: tl.constexpr,
    BS: tl.constexpr, BH: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of one step and sequence: the query's, the source's, or both."""
    row = tl.program_id(0).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    h = tl.arange(0, BH)
    h_there = h < H
    columns = tl.arange(0, BV)
    column_there = columns < V
    q = tl.load(query + row * query_row + h, h_there, 0.0).to(tl.float32)
    given = tl.load(dcontext + row * dcontext_row + columns, column_there, 0.0).to(tl.float32)
    if ADDITIVE:
        vector = tl.load(v + h, h_there, 0.0).to(tl.float32)
    if NORM:
        gains = tl.load(gain + h, h_there, 0.0).to(tl.float32)
        shifts = tl.load(shift + h, h_there, 0.0).to(tl.float32)
    normaliser = tl.load(lse + row)
    # What the softmax subtracts, the mean of what reaches the weights, is the context's product with its gradient.
    mean_above = tl.sum(tl.load(context + row * context_row + columns, column_there, 0.0).to(tl.float32) * given, 0)
    if WEIGHTS:
        for s0 in range(0, length, BS):
            positions = s0 + tl.arange(0, BS)
            there = positions < length
            share = tl.exp(tl.load(scores + row * S + positions, there, 0.0) - normaliser)
            above = tl.load(dweights + row * dweights_row + positions, there, 0.0).to(tl.float32)
            mean_above += tl.sum(tl.where(there, share * above, 0.0), 0)
    dq = tl.zeros([BS, BH], tl.float32)
    dv = tl.zeros([BS, BH], tl.float32)
    dgain = tl.zeros([BS, BH], tl.float32)
    dshift = tl.zeros([BS, BH], tl.float32)
    for s0 in tl.range(0, S if SOURCE else length, BS, num_stages=STAGES):
        positions = s0 + tl.arange(0, BS)
        there = positions < length
        places = positions.to(tl.int64)[:, None]
        value = tl.load(
            values + places * values_step + row * values_row + columns[None, :],
            there[:, None] & column_there[None, :],
            0.0,
        ).to(tl.float32)
        k = tl.load(keys + places * keys_step + row * keys_row + h[None, :], there[:, None] & h_there[None, :], 0.0).to(
            tl.float32
        )
        share = tl.exp(tl.load(scores + row * S + positions, there, 0.0) - normaliser)
        share = tl.where(there, share, 0.0)
        above = tl.sum(value * given[None, :], 1)
        if WEIGHTS:
            above += tl.load(dweights + row * dweights_row + positions, there, 0.0).to(tl.float32)
        dscore = (share * (above - mean_above))[:, None]
        if NORM:
            at = statistics + row * S + positions
            apart = (row * 0 + B) * S
            mean = tl.load(at, there, 0.0)[:, None]
            rstd = tl.load(at + apart, there, 0.0)[:, None]
            slope_mean = tl.load(at + 2 * apart, there, 0.0)[:, None]
            lean_mean = tl.load(at + 3 * apart, there, 0.0)[:, None]
            # Zeros where nothing is looked at: a NaN in the query must not get there.
            normalised = tl.where(there[:, None], (q[None, :] + k - mean) * rstd, 0.0)
            squashed = tanh(normalised * gains[None, :] + shifts[None, :], HARDWARE)
            slope = vector[None, :] * (1.0 - squashed * squashed)
            if SOURCE:
                dv += dscore * squashed
                dshift += dscore * slope
                dgain += dscore * slope * normalised
            dkey = dscore * rstd * (slope * gains[None, :] - slope_mean - normalised * lean_mean)
            dq += dkey
        elif ADDITIVE:
            squashed = tanh(tl.where(there[:, None], q[None, :] + k, 0.0), HARDWARE)
            scaled = dscore * squashed
            if SOURCE:
                dv += scaled
            dkey = dscore - scaled * squashed
            dq += dkey
            dkey = dkey * vector[None, :]
        else:
            dkey = tl.where(there[:, None], dscore * q[None, :], 0.0)
            dq += dscore * k
        if SOURCE:
            out = (places * B + row) * H + h[None, :]
            within = (positions < S)[:, None] & h_there[None, :]
            if ADD:
                dkey += tl.load(dkeys + out, within, 0.0).to(tl.float32)
            tl.store(dkeys + out, dkey.to(dkeys.dtype.element_ty), within)
            dvalue = tl.where(there[:, None], share[:, None] * given[None, :], 0.0)
            out = (places * B + row) * V + columns[None, :]
            within = (positions < S)[:, None] & column_there[None, :]
            if ADD:
                dvalue += tl.load(dvalues + out, within, 0.0).to(tl.float32)
            tl.store(dvalues + out, dvalue.to(dvalues.dtype.element_ty), within)
    if QUERY:
        found = tl.sum(dq, 0)
        if ADDITIVE and not NORM:
            found = found * vector
        tl.store(dquery + row * dquery_row + h, found.to(dquery.dtype.element_ty), h_there)
    if SOURCE and ADDITIVE:
        tl.store(parameters + row * H + h, tl.sum(dv, 0), h_there)
    if SOURCE and NORM:
        tl.store(parameters + (B + row) * H + h, tl.sum(dgain, 0), h_there)
        tl.store(parameters + (2 * B + row) * H + h, tl.sum(dshift, 0), h_there)

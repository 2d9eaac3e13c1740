"""One decoder step: a Triton program per sequence, which reads each key and value once.

With a single step there is no reuse between steps, so that the time is that of reading keys and values. A tile is
[C * BS, W]: W features lie across the lanes of a warp, and row c * BS + s is piece c of position s, so that each warp
holds all pieces of its own positions. A warp computes the scores and the online softmax of its positions independently;
the warps are combined once, at the end. The next block is loaded while the current one is computed.
"""

# Triton's compiler would interpret annotations as types.
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportArgumentType=false
# Triton comes with PyTorch's builds for GPUs alone.
# pyright: reportMissingImports=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gatewise.attention.fused.programs.pieces import length_of, tanh


@triton.jit
def pieces_of(BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Return the position of each row of a tile [C * BS, 1], and the index of each element in its vector."""
    rows = tl.arange(0, C * BS)
    return (rows % BS)[:, None], (rows // BS)[:, None] * W + tl.arange(0, W)[None, :]


@triton.jit
def over_features(x, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Sum a tile over its features; return one sum per position."""
    return tl.sum(tl.sum(tl.reshape(x, [C, BS, W]), 0), 1)


@triton.jit
def over_positions(x, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Sum a tile over its positions; return [C, W]."""
    return tl.sum(tl.reshape(x, [C, BS, W]), 1)


@triton.jit
def for_rows(x, BS: tl.constexpr, C: tl.constexpr):
    """Expand one number per position to the rows of a tile."""
    return tl.reshape(tl.broadcast_to(x[None, :], [C, BS]), [C * BS])[:, None]


@triton.jit(do_not_specialize=["B", "S"])
def step_program(
    query, keys, values, lengths, v, gain, shift, context, weights, scores, lse, statistics,
    B, S, H, V, epsilon,
    query_step, query_row, keys_step, keys_row, values_step, values_row, context_step, context_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr, WEIGHTS: tl.constexpr,
    HARDWARE: tl.constexpr, BS: tl.constexpr, CH: tl.constexpr, WH: tl.constexpr, CV: tl.constexpr, WV: tl.constexpr,
):  # fmt: skip
    """Compute the context of one step and sequence with an online softmax."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1).to(tl.int64)
    slots = tl.arange(0, BS)
    k_slots, h = pieces_of(BS, CH, WH)
    value_slots, columns = pieces_of(BS, CV, WV)
    h_there = h < H
    column_there = columns < V
    # Data shared by all positions are loaded once per position: another layout would be converted in every block.
    k_at = keys + k_slots.to(tl.int64) * keys_step + row * keys_row + h
    value_at = values + value_slots.to(tl.int64) * values_step + row * values_row + columns
    # The first keys are loaded before the length is known; the scores of keys beyond it are masked later.
    k_next = tl.load(k_at, (k_slots < S) & h_there, 0.0)
    length = length_of(lengths, row, S, RAGGED)
    value_next = tl.load(value_at, (value_slots < length) & column_there, 0.0)
    q = tl.load(query + step * query_step + row * query_row + h, h_there, 0.0).to(tl.float32)
    if ADDITIVE:
        vector = tl.load(v + h, h_there, 0.0).to(tl.float32)
    if NORM:
        gains = tl.load(gain + h, h_there, 0.0).to(tl.float32)
        shifts = tl.load(shift + h, h_there, 0.0).to(tl.float32)
    pair_row = (step * B + row) * S
    largest = tl.full([BS], -float("inf"), tl.float32)
    total = tl.zeros([BS], tl.float32)
    found = tl.zeros([CV * BS, WV], tl.float32)
    for s0 in range(0, length, BS):
        positions = s0 + slots
        there = positions < length
        k = k_next.to(tl.float32)
        value = value_next.to(tl.float32)
        further = row * 0 + (s0 + BS)  # as a 64-bit integer
        k_next = tl.load(k_at + further * keys_step, (s0 + BS + k_slots < length) & h_there, 0.0)
        value_next = tl.load(value_at + further * values_step, (s0 + BS + value_slots < length) & column_there, 0.0)
        if NORM:
            total_in = q + k
            mean = over_features(total_in, BS, CH, WH) / H
            centred = tl.where(h_there, total_in - for_rows(mean, BS, CH), 0.0)
            rstd = 1.0 / tl.sqrt(over_features(centred * centred, BS, CH, WH) / H + epsilon)
            normalised = centred * for_rows(rstd, BS, CH)
            squashed = tanh(normalised * gains + shifts, HARDWARE)
            score = over_features(squashed * vector, BS, CH, WH)
            if KEEP:
                slope = vector * gains * (1.0 - squashed * squashed)
                at = statistics + (step * 4 * B + row) * S + positions
                apart = (row * 0 + B) * S
                tl.store(at, mean, there)
                tl.store(at + apart, rstd, there)
                tl.store(at + 2 * apart, over_features(slope, BS, CH, WH) / H, there)
                tl.store(at + 3 * apart, over_features(slope * normalised, BS, CH, WH) / H, there)
        elif ADDITIVE:
            score = over_features(tanh(q + k, HARDWARE) * vector, BS, CH, WH)
        else:
            score = over_features(q * k, BS, CH, WH)
        if KEEP or WEIGHTS:
            tl.store(scores + pair_row + positions, score, there)
        score = tl.where(there, score, -float("inf"))
        larger = tl.maximum(largest, score)
        base = tl.where(larger == -float("inf"), 0.0, larger)
        shrunk = tl.exp(largest - base)
        share = tl.exp(score - base)
        total = total * shrunk + share
        found = found * for_rows(shrunk, BS, CV) + for_rows(share, BS, CV) * value
        largest = larger
    highest = tl.max(largest, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    shrunk = tl.exp(largest - base)
    sums = tl.sum(total * shrunk, 0)
    # The sum of a sequence of length 0 is zero; a NaN must remain NaN.
    sums = tl.where(sums == 0.0, 1.0, sums)
    normaliser = highest + tl.log(sums)
    if KEEP:
        tl.store(lse + step * B + row, normaliser)
    found = over_positions(found * for_rows(shrunk / sums, BS, CV), BS, CV, WV)
    columns = tl.arange(0, CV)[:, None] * WV + tl.arange(0, WV)[None, :]
    out = context + step * context_step + row * context_row + columns
    tl.store(out, found.to(context.dtype.element_ty), columns < V)
    if WEIGHTS:
        tl.debug_barrier()  # the scores read below were written by other threads of this program
        for s0 in range(0, S, BS):
            positions = s0 + slots
            there = positions < length
            share = tl.exp(tl.load(scores + pair_row + positions, there, 0.0) - normaliser)
            share = tl.where(there, share, 0.0)
            tl.store(weights + pair_row + positions, share.to(weights.dtype.element_ty), positions < S)


@triton.jit(do_not_specialize=["B", "S"])
def step_gradient_program(
    query, keys, values, lengths, v, gain, shift, scores, lse, statistics, dcontext, dweights,
    dscores, dquery, dkeys, dvalues, parameters,
    B, S, H, V,
    query_row, keys_step, keys_row, values_step, values_row, dcontext_row, dweights_row, dquery_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, RAGGED: tl.constexpr, WEIGHTS: tl.constexpr, QUERY: tl.constexpr,
    SOURCE: tl.constexpr, ADD: tl.constexpr, HARDWARE: tl.constexpr,
    BS: tl.constexpr, CH: tl.constexpr, WH: tl.constexpr, CV: tl.constexpr, WV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one step and sequence: that of the query, those of the source, or both."""
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BS)
    k_slots, h = pieces_of(BS, CH, WH)
    value_slots, columns = pieces_of(BS, CV, WV)
    h_there = h < H
    column_there = columns < V
    # Data shared by all positions are loaded once per position: another layout would be converted in every block.
    k_at = keys + k_slots.to(tl.int64) * keys_step + row * keys_row + h
    value_at = values + value_slots.to(tl.int64) * values_step + row * values_row + columns
    # The first values are loaded before the length is known; results beyond it are masked later.
    value_next = tl.load(value_at, (value_slots < S) & column_there, 0.0)
    normaliser = tl.load(lse + row)
    length = length_of(lengths, row, S, RAGGED)
    score_next = tl.load(scores + row * S + slots, slots < length, 0.0)
    k_next = tl.load(k_at, (k_slots < length) & h_there, 0.0)
    q = tl.load(query + row * query_row + h, h_there, 0.0).to(tl.float32)
    given = tl.load(dcontext + row * dcontext_row + columns, column_there, 0.0).to(tl.float32)
    if ADDITIVE:
        vector = tl.load(v + h, h_there, 0.0).to(tl.float32)
    if NORM:
        gains = tl.load(gain + h, h_there, 0.0).to(tl.float32)
        shifts = tl.load(shift + h, h_there, 0.0).to(tl.float32)
    # First the gradients of the weights and their weighted sum, computed from the same rounded numbers that it is
    # subtracted from (see `score_gradient_program`).
    mean_above = tl.zeros([BS], tl.float32)
    for s0 in range(0, length, BS):
        positions = s0 + slots
        there = positions < length
        value = value_next.to(tl.float32)
        share = tl.where(there, tl.exp(score_next - normaliser), 0.0)
        further = row * 0 + (s0 + BS)  # as a 64-bit integer
        value_next = tl.load(value_at + further * values_step, (s0 + BS + value_slots < length) & column_there, 0.0)
        score_next = tl.load(scores + row * S + positions + BS, positions + BS < length, 0.0)
        above = over_features(value * given, BS, CV, WV)
        if WEIGHTS:
            above += tl.load(dweights + row * dweights_row + positions, there, 0.0).to(tl.float32)
        mean_above += tl.where(there, share * above, 0.0)
        tl.store(dscores + row * S + positions, above, there)
    mean_above = tl.sum(mean_above, 0)
    tl.debug_barrier()  # the data read below were written by other threads of this program
    score_next = tl.load(scores + row * S + slots, slots < length, 0.0)
    above_next = tl.load(dscores + row * S + slots, slots < length, 0.0)
    dq = tl.zeros([CH * BS, WH], tl.float32)
    dv = tl.zeros([CH * BS, WH], tl.float32)
    dgain = tl.zeros([CH * BS, WH], tl.float32)
    dshift = tl.zeros([CH * BS, WH], tl.float32)
    for s0 in range(0, S if SOURCE else length, BS):
        positions = s0 + slots
        there = positions < length
        inside = s0 + k_slots < length
        k = k_next.to(tl.float32)
        share = tl.where(there, tl.exp(score_next - normaliser), 0.0)
        dscore = for_rows(tl.where(there, share * (above_next - mean_above), 0.0), BS, CH)
        further = row * 0 + (s0 + BS)  # as a 64-bit integer
        k_next = tl.load(k_at + further * keys_step, (s0 + BS + k_slots < length) & h_there, 0.0)
        score_next = tl.load(scores + row * S + positions + BS, positions + BS < length, 0.0)
        above_next = tl.load(dscores + row * S + positions + BS, positions + BS < length, 0.0)
        if NORM:
            at = statistics + row * S + positions
            apart = (row * 0 + B) * S
            mean = for_rows(tl.load(at, there, 0.0), BS, CH)
            rstd = for_rows(tl.load(at + apart, there, 0.0), BS, CH)
            slope_mean = for_rows(tl.load(at + 2 * apart, there, 0.0), BS, CH)
            lean_mean = for_rows(tl.load(at + 3 * apart, there, 0.0), BS, CH)
            # Zero for masked positions: a NaN in the query must not reach them.
            normalised = tl.where(inside, (q + k - mean) * rstd, 0.0)
            squashed = tanh(normalised * gains + shifts, HARDWARE)
            slope = vector * (1.0 - squashed * squashed)
            if SOURCE:
                dv += dscore * squashed
                dshift += dscore * slope
                dgain += dscore * slope * normalised
            dkey = dscore * rstd * (slope * gains - slope_mean - normalised * lean_mean)
            dq += dkey
        elif ADDITIVE:
            squashed = tanh(tl.where(inside, q + k, 0.0), HARDWARE)
            scaled = dscore * squashed
            if SOURCE:
                dv += scaled
            dkey = dscore - scaled * squashed
            dq += dkey
            dkey = dkey * vector
        else:
            dkey = tl.where(inside, dscore * q, 0.0)
            dq += dscore * k
        if SOURCE:
            out = ((row * 0 + s0 + k_slots) * B + row) * H + h
            within = (s0 + k_slots < S) & h_there
            if ADD:
                dkey += tl.load(dkeys + out, within, 0.0).to(tl.float32)
            tl.store(dkeys + out, dkey.to(dkeys.dtype.element_ty), within)
            dvalue = tl.where(s0 + value_slots < length, for_rows(share, BS, CV) * given, 0.0)
            out = ((row * 0 + s0 + value_slots) * B + row) * V + columns
            within = (s0 + value_slots < S) & column_there
            if ADD:
                dvalue += tl.load(dvalues + out, within, 0.0).to(tl.float32)
            tl.store(dvalues + out, dvalue.to(dvalues.dtype.element_ty), within)
    h = tl.arange(0, CH)[:, None] * WH + tl.arange(0, WH)[None, :]
    h_there = h < H
    if QUERY:
        found = over_positions(dq, BS, CH, WH)
        if ADDITIVE and not NORM:
            found = found * tl.load(v + h, h_there, 0.0).to(tl.float32)
        tl.store(dquery + row * dquery_row + h, found.to(dquery.dtype.element_ty), h_there)
    if SOURCE and ADDITIVE:
        tl.store(parameters + row * H + h, over_positions(dv, BS, CH, WH), h_there)
    if SOURCE and NORM:
        tl.store(parameters + (B + row) * H + h, over_positions(dgain, BS, CH, WH), h_there)
        tl.store(parameters + (2 * B + row) * H + h, over_positions(dshift, BS, CH, WH), h_there)

"""The Triton programs.

Shapes and the order of their loops follow from what bounds the additive score: a hyperbolic tangent takes a special
function unit, of which a multiprocessor has 16 lanes beside 128 for additions and multiplications. A tile [BT, BS, BH]
(decoder steps, source positions, features) is laid out with features across threads, so that every sum over steps or
positions stays within a thread, and a sum over features is done once, at the end of its loop.

Forward:

- `attend_program`, one for each block of steps and sequence: scores, softmax and, for few steps, the context. The
  scores [T, B, S] pass through memory, 1/H of the map; in training they are what is kept.
- `context_program`: the context of many steps, a product on the tensor cores.

Backward:

- `score_gradient_program`: the gradient of every score.
- `value_gradient_program`, one for each block of positions and columns.
- `input_gradient_program`, one for each block of features and sequence: it alone sums over all steps and positions of
  its features. Nothing is added atomically, and the result is the same every time.
"""

# Annotations would be read by Triton's compiler as types.
# pyright: reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

# Change from batch to batch; a program for each divisibility of each would be compiled in the middle of training.
_LENGTHS = ["T", "S", "map_size"]


@triton.jit
def tanh(x, TANH: tl.constexpr):
    """The hyperbolic tangent, by the way that the call allows.

    "hardware" is one instruction, off by 2^-11 of the value. "float32" is right to the last bits: an exponential and a
    reciprocal, and near zero, where those would cancel, the odd polynomial of Cephes' tanhf. "portable" is the same in
    operations that Triton's interpreter knows.
    """
    if TANH == "hardware":
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    square = x * x
    small = -5.70498872745e-3 * square + 2.06390887954e-2
    small = small * square - 5.37397155531e-2
    small = small * square + 1.33314422036e-1
    small = small * square - 3.33332819422e-1
    small = small * square * x + x
    twice = x * 2.8853900817779268  # 2 / ln 2
    if TANH == "float32":
        # Without the detours for subnormal numbers, which cost as much as the rest and change nothing here.
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [twice], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / (1.0 + tl.exp2(tl.minimum(twice, 126.0, propagate_nan=tl.PropagateNan.ALL)))
    return tl.where(tl.abs(x) < 0.625, small, 1.0 - 2.0 * inverse)


@triton.jit
def product(a, b, sums, PRECISION: tl.constexpr):
    """Add a product to sums in float32; "portable" is for the interpreter, which takes bfloat16 for integers."""
    if PRECISION == "portable":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def length_of(lengths, row, S, RAGGED: tl.constexpr):
    """Source positions of a sequence."""
    if RAGGED:
        return tl.minimum(tl.maximum(tl.load(lengths + row).to(tl.int32), 0), S)
    return S


@triton.jit(do_not_specialize=_LENGTHS)
def attend_program(
    query, keys, values, lengths, v, gain, shift,
    context, weights, scores, lse, statistics,
    T, B, S, H, V, map_size, epsilon,
    query_step, query_row, keys_step, keys_row, values_step, values_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, RAGGED: tl.constexpr, KEEP: tl.constexpr, WEIGHTS: tl.constexpr,
    CONTEXT: tl.constexpr, TANH: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Scores of a block of steps against the whole source, their softmax, and the context."""
    row = tl.program_id(1).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    steps = tl.program_id(0) * BT + tl.arange(0, BT)
    step_there = steps < T
    pair_row = (steps.to(tl.int64) * B + row) * S
    q_row = query + steps.to(tl.int64) * query_step + row * query_row
    largest = tl.full([BT], -float("inf"), tl.float32)
    total = tl.zeros([BT], tl.float32)
    for s0 in range(0, length, BS):
        positions = s0 + tl.arange(0, BS)
        position_there = positions < length
        k_row = keys + positions.to(tl.int64) * keys_step + row * keys_row
        mean = tl.zeros([BT, BS], tl.float32)
        rstd = tl.zeros([BT, BS], tl.float32)
        if NORM:
            sums = tl.zeros([BT, BS, BH], tl.float32)
            for h0 in range(0, H, BH):
                h = h0 + tl.arange(0, BH)
                q = tl.load(
                    q_row[:, None, None] + h[None, None, :], step_there[:, None, None] & (h < H)[None, None, :], 0.0
                )
                k = tl.load(
                    k_row[None, :, None] + h[None, None, :], position_there[None, :, None] & (h < H)[None, None, :], 0.0
                )
                sums += q.to(tl.float32) + k.to(tl.float32)
            mean = tl.sum(sums, 2) / H
            sums = tl.zeros([BT, BS, BH], tl.float32)
            for h0 in range(0, H, BH):
                h = h0 + tl.arange(0, BH)
                q = tl.load(
                    q_row[:, None, None] + h[None, None, :], step_there[:, None, None] & (h < H)[None, None, :], 0.0
                )
                k = tl.load(
                    k_row[None, :, None] + h[None, None, :], position_there[None, :, None] & (h < H)[None, None, :], 0.0
                )
                centred = q.to(tl.float32) + k.to(tl.float32) - mean[:, :, None]
                sums += tl.where((h < H)[None, None, :], centred * centred, 0.0)
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
                    squashed = tanh(into, TANH)
                    slope = vector * gains * (1.0 - squashed * squashed)
                    slopes += slope
                    leans += slope * normalised
                else:
                    squashed = tanh(into, TANH)
                sums += squashed * vector
            else:
                sums += q * k
        score = tl.sum(sums, 2)
        there = step_there[:, None] & position_there[None, :]
        at = pair_row[:, None] + positions[None, :]
        tl.store(scores + at, score, there)
        if NORM and KEEP:
            at += steps.to(tl.int64)[:, None] * (3 * map_size)
            tl.store(statistics + at, mean, there)
            tl.store(statistics + (at + map_size), rstd, there)
            tl.store(statistics + (at + map_size + map_size), tl.sum(slopes, 2) / H, there)
            tl.store(statistics + (at + map_size + map_size + map_size), tl.sum(leans, 2) / H, there)
        score = tl.where(position_there[None, :], score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(score - base[:, None]), 1)
        largest = larger
    # Of a sequence without source the sum is zero; a NaN must stay one.
    normaliser = largest + tl.log(tl.where(total == 0.0, 1.0, total))
    if KEEP or not CONTEXT:
        tl.store(lse + steps.to(tl.int64) * B + row, normaliser, step_there)
    tl.debug_barrier()  # other threads of this program wrote the scores that are read now
    if WEIGHTS:
        for s0 in range(0, S, BS):
            positions = s0 + tl.arange(0, BS)
            within = step_there[:, None] & (positions < length)[None, :]
            at = pair_row[:, None] + positions[None, :]
            share = tl.exp(tl.load(scores + at, within, 0.0) - normaliser[:, None])
            share = tl.where(within, share, 0.0)
            there = step_there[:, None] & (positions < S)[None, :]
            tl.store(weights + at, share.to(weights.dtype.element_ty), there)
    if CONTEXT:
        for c0 in range(0, V, BH):
            columns = c0 + tl.arange(0, BH)
            sums = tl.zeros([BT, BS, BH], tl.float32)
            for s0 in range(0, length, BS):
                positions = s0 + tl.arange(0, BS)
                within = step_there[:, None] & (positions < length)[None, :]
                share = tl.exp(
                    tl.load(scores + pair_row[:, None] + positions[None, :], within, 0.0) - normaliser[:, None]
                )
                share = tl.where(within, share, 0.0)
                value = tl.load(
                    values
                    + positions.to(tl.int64)[None, :, None] * values_step
                    + row * values_row
                    + columns[None, None, :],
                    (positions < length)[None, :, None] & (columns < V)[None, None, :],
                    0.0,
                )
                sums += share[:, :, None] * value.to(tl.float32)
            out = context + (steps.to(tl.int64)[:, None] * B + row) * V + columns[None, :]
            there = step_there[:, None] & (columns < V)[None, :]
            tl.store(out, tl.sum(sums, 1).to(context.dtype.element_ty), there)


@triton.jit(do_not_specialize=_LENGTHS)
def context_program(
    values, lengths, scores, lse, context,
    T, B, S, V, values_step, values_row,
    RAGGED: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The context of a block of steps and columns, as a product on the tensor cores."""
    row = tl.program_id(2).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    steps = tl.program_id(0) * BT + tl.arange(0, BT)
    step_there = steps < T
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
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
            position_there[:, None] & (columns < V)[None, :],
            0.0,
        )
        sums = product(share, value, sums, PRECISION)
    out = context + (steps.to(tl.int64)[:, None] * B + row) * V + columns[None, :]
    tl.store(out, sums.to(context.dtype.element_ty), step_there[:, None] & (columns < V)[None, :])


@triton.jit(do_not_specialize=_LENGTHS)
def score_gradient_program(
    values, lengths, scores, lse, dcontext, dweights, dscores,
    T, B, S, V, values_step, values_row, dcontext_step, dcontext_row, dweights_step, dweights_row,
    RAGGED: tl.constexpr, WEIGHTS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores of a block of steps: share * (above - sum of share * above)."""
    row = tl.program_id(1).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    steps = tl.program_id(0) * BT + tl.arange(0, BT)
    step_there = steps < T
    pair_row = (steps.to(tl.int64) * B + row) * S
    normaliser = tl.load(lse + steps.to(tl.int64) * B + row, step_there, 0.0)
    mean = tl.zeros([BT], tl.float32)
    for s0 in range(0, length, BS):
        positions = s0 + tl.arange(0, BS)
        position_there = positions < length
        within = step_there[:, None] & position_there[None, :]
        if DOT:
            above = tl.zeros([BT, BS], tl.float32)
            for c0 in range(0, V, BH):
                columns = c0 + tl.arange(0, BH)
                value = tl.load(
                    values + positions.to(tl.int64)[None, :] * values_step + row * values_row + columns[:, None],
                    position_there[None, :] & (columns < V)[:, None],
                    0.0,
                )
                given = tl.load(
                    dcontext + steps.to(tl.int64)[:, None] * dcontext_step + row * dcontext_row + columns[None, :],
                    step_there[:, None] & (columns < V)[None, :],
                    0.0,
                )
                above = product(given, value, above, PRECISION)
        else:
            sums = tl.zeros([BT, BS, BH], tl.float32)
            for c0 in range(0, V, BH):
                columns = c0 + tl.arange(0, BH)
                column_there = (columns < V)[None, None, :]
                value = tl.load(
                    values
                    + positions.to(tl.int64)[None, :, None] * values_step
                    + row * values_row
                    + columns[None, None, :],
                    position_there[None, :, None] & column_there,
                    0.0,
                )
                given = dcontext + steps.to(tl.int64)[:, None, None] * dcontext_step + row * dcontext_row
                given = tl.load(given + columns[None, None, :], step_there[:, None, None] & column_there, 0.0)
                sums += value.to(tl.float32) * given.to(tl.float32)
            above = tl.sum(sums, 2)
        if WEIGHTS:
            given = dweights + steps.to(tl.int64)[:, None] * dweights_step + row * dweights_row + positions[None, :]
            above += tl.load(given, within, 0.0).to(tl.float32)
        at = pair_row[:, None] + positions[None, :]
        share = tl.exp(tl.load(scores + at, within, 0.0) - normaliser[:, None])
        mean += tl.sum(tl.where(within, share * above, 0.0), 1)
        tl.store(dscores + at, above, within)
    tl.debug_barrier()
    for s0 in range(0, length, BS):
        positions = s0 + tl.arange(0, BS)
        within = step_there[:, None] & (positions < length)[None, :]
        at = pair_row[:, None] + positions[None, :]
        share = tl.exp(tl.load(scores + at, within, 0.0) - normaliser[:, None])
        above = tl.load(dscores + at, within, 0.0)
        tl.store(dscores + at, share * (above - mean[:, None]), within)


@triton.jit(do_not_specialize=_LENGTHS)
def input_gradient_program(
    query, keys, lengths, v, gain, shift, statistics, dscores,
    dquery, dquery_sums, dkeys, parameters,
    T, B, S, H, map_size, query_step, query_row, keys_step, keys_row,
    ADDITIVE: tl.constexpr, NORM: tl.constexpr, RAGGED: tl.constexpr, ADD: tl.constexpr, TANH: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of features of query, keys and parameters."""
    row = tl.program_id(1).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    # Declared as not contiguous, so that a warp's lanes lie along the features whatever the width of an element.
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
    dv = tl.zeros([BS, BH], tl.float32)
    dgain = tl.zeros([BS, BH], tl.float32)
    dshift = tl.zeros([BS, BH], tl.float32)
    for s0 in range(0, S, BS):
        positions = s0 + tl.arange(0, BS)
        position_there = positions < length
        k_at = keys + positions.to(tl.int64)[None, :, None] * keys_step + row * keys_row + h[None, None, :]
        k = tl.load(k_at, position_there[None, :, None] & h_there[None, None, :], 0.0).to(tl.float32)
        dk = tl.zeros([BS, BH], tl.float32)
        first = tl.zeros([1, 1], tl.int32) + s0
        for t0 in range(0, tl.where(s0 < length, T, 0), BT):
            steps = t0 + tl.arange(0, BT)
            step_there = steps < T
            within = step_there[:, None] & position_there[None, :]
            at = (steps.to(tl.int64)[:, None] * B + row) * S + positions[None, :]
            q_at = query + steps.to(tl.int64)[:, None, None] * query_step + row * query_row + h[None, None, :]
            q = tl.load(q_at, step_there[:, None, None] & h_there[None, None, :], 0.0).to(tl.float32)
            dscore = tl.load(dscores + at, within, 0.0)[:, :, None]
            if ADDITIVE:
                into = q + k
                if NORM:
                    at += steps.to(tl.int64)[:, None] * (3 * map_size)
                    mean = tl.load(statistics + at, within, 0.0)[:, :, None]
                    rstd = tl.load(statistics + (at + map_size), within, 0.0)[:, :, None]
                    slope_mean = tl.load(statistics + (at + map_size + map_size), within, 0.0)[:, :, None]
                    lean_mean = tl.load(statistics + (at + map_size + map_size + map_size), within, 0.0)[:, :, None]
                    normalised = (into - mean) * rstd
                    squashed = tanh(normalised * gains[None, None, :] + shifts[None, None, :], TANH)
                    dv += tl.sum(dscore * squashed, 0)
                    slope = vector[None, None, :] * (1.0 - squashed * squashed)
                    dshift += tl.sum(dscore * slope, 0)
                    dgain += tl.sum(dscore * slope * normalised, 0)
                    slope = slope * gains[None, None, :] - slope_mean - normalised * lean_mean
                    found = dscore * rstd * slope
                else:
                    squashed = tanh(into, TANH)
                    scaled = dscore * squashed
                    dv += tl.sum(scaled, 0)
                    found = dscore - scaled * squashed
                dk += tl.sum(found, 0)
                dq = tl.sum(found, 1)
                if not NORM:
                    dq = dq * vector[None, :]
            else:
                dk += tl.sum(dscore * q, 0)
                dq = tl.sum(dscore * k, 1)
            out = (steps.to(tl.int64)[:, None] * B + row) * H + h[None, :]
            there = step_there[:, None] & h_there[None, :]
            dq += tl.load(dquery_sums + out, there & (first > 0), 0.0)
            tl.store(dquery_sums + out, dq, there & (first + BS < length))
            tl.store(dquery + out, dq.to(dquery.dtype.element_ty), there & (first + BS >= length))
        if ADDITIVE and not NORM:
            dk = dk * vector[None, :]
        # A NaN in a query must not give a gradient to a key that was never looked at.
        dk = tl.where(position_there[:, None], dk, 0.0)
        out = (positions.to(tl.int64)[:, None] * B + row) * H + h[None, :]
        there = (positions < S)[:, None] & h_there[None, :]
        if ADD:
            dk += tl.load(dkeys + out, there, 0.0).to(tl.float32)
        tl.store(dkeys + out, dk.to(dkeys.dtype.element_ty), there)
        tl.debug_barrier()  # the query's sums are read in the next round
    for t0 in range(0, tl.where(length == 0, T, 0), BT):
        steps = t0 + tl.arange(0, BT)
        out = (steps.to(tl.int64)[:, None] * B + row) * H + h[None, :]
        nothing = tl.zeros([BT, BH], tl.float32).to(dquery.dtype.element_ty)
        tl.store(dquery + out, nothing, (steps < T)[:, None] & h_there[None, :])
    if ADDITIVE:
        tl.store(parameters + row * H + h, tl.sum(dv, 0), h_there)
    if NORM:
        tl.store(parameters + (B + row) * H + h, tl.sum(dgain, 0), h_there)
        tl.store(parameters + (2 * B + row) * H + h, tl.sum(dshift, 0), h_there)


@triton.jit(do_not_specialize=_LENGTHS)
def value_gradient_program(
    lengths, scores, lse, dcontext, dvalues,
    T, B, S, V, dcontext_step, dcontext_row,
    RAGGED: tl.constexpr, ADD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of positions and columns of the values: the sum over steps of share * dcontext."""
    row = tl.program_id(2).to(tl.int64)
    length = length_of(lengths, row, S, RAGGED)
    s0 = tl.program_id(0) * BS
    positions = s0 + tl.arange(0, BS)
    position_there = positions < length
    columns = tl.program_id(1) * BV + tl.arange(0, BV)
    column_there = columns < V
    found = tl.zeros([BS, BV], tl.float32)
    if DOT:
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
    else:
        # One step at a time: on GPUs, Triton 3.6 adds up each number several times in a sum over so few steps.
        for step in range(0, tl.where(s0 < length, T, 0)):
            pair = step * B + row
            score = tl.load(scores + pair * S + positions, position_there, 0.0)
            share = tl.where(position_there, tl.exp(score - tl.load(lse + pair)), 0.0)
            above = tl.load(dcontext + step * dcontext_step + row * dcontext_row + columns, column_there, 0.0)
            found += share[:, None] * above.to(tl.float32)[None, :]
    out = (positions.to(tl.int64)[:, None] * B + row) * V + columns[None, :]
    there = (positions < S)[:, None] & column_there[None, :]
    found = tl.where(position_there[:, None], found, 0.0)
    if ADD:
        found += tl.load(dvalues + out, there, 0.0).to(tl.float32)
    tl.store(dvalues + out, found.to(dvalues.dtype.element_ty), there)

"""What the backward pass of a lean layer computes around the launch of a segment: products of the library."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import history, operands, products
from gatewise.kernels.persistent.operands import Operand, states_before
from gatewise.kernels.persistent.padding import fitted, gates_narrowed, gates_widened, is_wide
from gatewise.kernels.persistent.plan import hidden_of
from gatewise.kernels.persistent.segments import Segment, parted
from gatewise.kernels.persistent.tokens import Tokens
from gatewise.kernels.stack import Layer, LayerGradients
from gatewise.kernels.sums import Run, input_runs, of_input


class Call(NamedTuple):
    """What stays the same from segment to segment.

    Attributes:
        layer: The inputs; matrices that are held are rounded up.
        h0: Initial hidden state, as `history.initial_hidden_states` returns it.
        y: Outputs.
        into: For the gradients of the weights, in the layer's flat order; or nothing.
        totals: For those of each direction's matrices, rounded up; None for memory of a segment's own.
        as_batch: Whether the same product of both directions may be made at once.
        problem: The problem.
        runs: The sums that the recurrent product gives.
    """

    layer: Layer
    h0: Tensor
    y: Tensor
    into: tuple[Tensor | None, ...]
    totals: tuple[Tensor | None, ...]
    as_batch: bool
    problem: Problem
    runs: tuple[Run, ...]

    def into_of(self, direction: int) -> tuple[Tensor | None, ...]:
        """Return where the gradients of a direction's weights go."""
        each = len(self.into) // len(self.layer.weights)
        return self.into[direction * each : (direction + 1) * each]


class Place(NamedTuple):
    """Where the backward pass is, and what went in there.

    Attributes:
        both: The segment of each direction.
        tokens: Its steps, and their order.
        inputs: Of each direction [tokens, I], I rounded up, without what lies beyond the ends of sequences.
        history: Of each direction, the hidden states that went in, H rounded up.
        is_first: Whether it is the first segment to be visited.
        is_last: Whether it is the last.
    """

    both: tuple[Segment, ...]
    tokens: Tokens
    inputs: list[Tensor]
    history: list[tuple[history.Part, ...]]
    is_first: bool
    is_last: bool


def place(call: Call, both: tuple[Segment, ...], index: int, count: int, scratch: Scratch) -> Place:
    """Return where the backward pass is at visit `index` of `count`, with what went in there."""
    layer, tokens = call.layer, Tokens(both[0].steps, call.y.shape[1], by_row=False)
    written: list[tuple[Operand, Tensor]] = []

    def new(operand: Operand) -> Tensor:
        written.append((operand, operand.new(tokens, scratch)))
        return written[-1][1]

    inputs = []
    for own in dict.fromkeys(both):
        x = layer.x[own.start : own.stop]
        anything = layer.lengths is not None and not layer.ends_in_zeros
        lies = not anything and x.is_contiguous() and is_wide(x.flatten(0, 1))
        inputs.append(x.flatten(0, 1) if lies else new(Operand(layer.x, start=own.start)))
    found = [history.hidden_states(layer, call.h0, call.y, direction, own) for direction, own in enumerate(both)]
    everything = slice(0, tokens.time * tokens.batch)
    past = [(history.Part(everything, new(own)),) if isinstance(own, Operand) else own for own in found]
    if written:
        operands.write([own for own, _ in written], [copy for _, copy in written], tokens, layer.lengths)
    return Place(both, tokens, [inputs[0], inputs[-1]], past, index == 0, index == count - 1)


def make_sums(call: Call, at: Place, gates: list[Tensor], room: list[Tensor] | None, scratch: Scratch) -> None:
    """Make the gate sums of a segment again, but for biases; `room` as in `_in_one_part`."""
    size, past = call.h0.shape[2], _in_one_part(call, at, room)
    for direction, (weights, sums) in enumerate(zip(call.layer.weights, gates, strict=True)):
        with scratch.frame():
            matrix = gates_widened(weights.w_ih, call.problem, scratch)
            deep_products.mm(at.inputs[direction], matrix.t(), of_input(sums, matrix.shape[0]))
        with scratch.frame():
            w_hh, hidden = gates_widened(weights.w_hh, call.problem, scratch), hidden_of(size)
            for part, run in itertools.product(past[direction], call.runs):
                into = run.columns_of(sums[part.tokens], hidden)
                _add(into, part.states, run.rows_of(w_hh, hidden).t(), begun=run.adds)


def _in_one_part(call: Call, at: Place, room: list[Tensor] | None) -> list[tuple[history.Part, ...]]:
    """Return the history of each direction; where it lies in two parts, a copy.

    For the few rows of a sequence's first step, a product takes longer than to copy the others.

    Args:
        call: The call.
        at: The segment.
        room: Of each direction, memory that is free [tokens, 4H]; None if there is none, and history stays as it lies.
    """
    if room is None:
        return at.history
    size, count = call.h0.shape[2], at.tokens.time * at.tokens.batch
    found, wanted, copies = [], [], []
    for direction, (own, parts) in enumerate(zip(at.both, at.history, strict=True)):
        if len(parts) == 1:
            found.append(parts)
            continue
        outputs = call.y[..., direction * size : (direction + 1) * size]
        wanted.append(states_before(outputs, call.h0[direction], direction, own.start))
        copies.append(room[direction].flatten()[: count * size].view(count, size))
        found.append((history.Part(slice(0, count), copies[-1]),))
    if wanted:
        operands.write(wanted, copies, at.tokens, call.layer.lengths)
    return found


def add_to_inputs(call: Call, at: Place, dgates: list[Tensor], dx: Tensor, scratch: Scratch) -> None:
    """Add what a segment gives to the gradient of x [T, B, I]."""
    time, batch, features = dx.shape
    for direction, (own, weights) in enumerate(zip(at.both, call.layer.weights, strict=True)):
        with scratch.frame():
            w_ih = gates_widened(weights.w_ih, call.problem, scratch)
            for part, begun in parted(own, _visited_by_the_other(at.both, direction, time)):
                tokens = slice((part.start - own.start) * batch, (part.stop - own.start) * batch)
                dsums = of_input(dgates[direction][tokens], w_ih.shape[0])
                rows = dx[part.start : part.stop].flatten(0, 1)
                if w_ih.shape[1] == features:
                    _add(rows, dsums, w_ih, begun=begun)
                    continue
                with scratch.frame():
                    wide = scratch.new_empty(rows.shape[0], w_ih.shape[1])
                    deep_products.mm(dsums, w_ih, wide)
                    if begun:
                        rows.add_(wide[:, :features])
                    else:
                        fitted(wide, *rows.shape, into=rows)


def _visited_by_the_other(both: tuple[Segment, ...], direction: int, time: int) -> Segment:
    """Return the steps whose share of the gradient of x the other direction has given already."""
    if len(both) == 1:
        return Segment(0, 0)
    # The first direction comes first in each visit, and goes back from the last step; the other one from the first.
    return Segment(0, both[1].start) if direction == 0 else Segment(both[0].start, time)


def add_to_weights(call: Call, at: Place, dgates: list[Tensor], room: list[Tensor] | None, scratch: Scratch) -> None:
    """Add what a segment gives to the gradients of the matrices; after the last one, hand them over.

    `room` is as in `_in_one_part`.
    """
    size, past = call.h0.shape[2], _in_one_part(call, at, room)
    hidden = hidden_of(size)
    everything = slice(0, at.tokens.time * at.tokens.batch)
    directions = range(len(at.both))
    kinds = (input_runs(call.problem.cell), [(history.Part(everything, own),) for own in at.inputs]), (call.runs, past)
    for index, (runs, read) in enumerate(kinds):
        into = [call.into_of(direction)[index] for direction in directions]
        totals = [call.totals[2 * direction + index] for direction in directions]
        lasting = [total for total in totals if total is not None]
        if len(lasting) == len(totals) and all(len(parts) == 1 for parts in read):
            for run in runs:
                made = [
                    products.Product(
                        run.columns_of(own, hidden).t(),
                        parts[0].states,
                        run.rows_of(total, hidden),
                        adds=not at.is_first,
                    )
                    for own, parts, total in zip(dgates, read, lasting, strict=False)
                ]
                products.multiply(made, size, scratch, as_batch=call.as_batch)
        for direction, own, total in zip(directions, into, totals, strict=True):
            if own is None:
                continue
            with scratch.frame():
                if len(lasting) < len(totals) or any(len(parts) > 1 for parts in read):
                    total = scratch.new_empty(_wide_shape(own, size)) if total is None else total
                    for (number, part), run in itertools.product(enumerate(read[direction]), runs):
                        begun = number > 0 or not at.is_first
                        dsums = run.columns_of(dgates[direction][part.tokens], hidden)
                        _add(run.rows_of(total, hidden), dsums.t(), part.states, begun=begun)
                if at.is_last and total is not None and total is not own:
                    gates_narrowed(total, size, own.shape[1], own)


def write_biases(call: Call, sums: Tensor) -> None:
    """Write the gradients of each direction's biases from their sums [D, 4H] over segments, H rounded up."""
    for direction, own in enumerate(sums):
        _, _, *both = (weight for weight in call.into_of(direction) if weight is not None)
        products.write_biases(call.problem, own, *both)


def _add(total: Tensor, left: Tensor, right: Tensor, *, begun: bool) -> None:
    """Add a product to what was begun, or begin with it."""
    if begun:
        deep_products.addmm(total, left, right)
    else:
        deep_products.mm(left, right, total)


def totals_of(into: LayerGradients, size: int, directions: int, scratch: Scratch | None) -> tuple[Tensor | None, ...]:
    """Return where the gradients of the matrices add up; without `scratch` only those that lie as they are returned."""
    each = len(into.weights) // directions
    matrices = [own for index, own in enumerate(into.weights) if index % each < 2] if each else []
    totals: list[Tensor | None] = []
    for own in matrices:
        if own is None or own.shape == _wide_shape(own, size):
            totals.append(own)
        else:
            totals.append(None if scratch is None else scratch.new_empty(_wide_shape(own, size)))
    return tuple(totals)


def _wide_shape(matrix: Tensor, size: int) -> tuple[int, int]:
    return matrix.shape[0] // size * hidden_of(size), hidden_of(matrix.shape[1])

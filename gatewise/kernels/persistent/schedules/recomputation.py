"""The backward pass of one checkpointed segment: recompute its gates, and add up gradients of x and weights.

The backward pass of a segment reads the inputs of its steps and the hidden states that the steps read, recomputes the
gate sums from both where they were not kept, and adds the segment's share to the gradients of x and of the weights.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.launches import Operand, Tokens
from gatewise.kernels.persistent.schedules import matrix_products
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.segments import Segment, parted
from gatewise.kernels.stack import Layer, LayerGradients
from gatewise.kernels.sums import Run, input_runs, of_input


class SegmentedLayer(NamedTuple):
    """The tensors of a layer's backward pass that are the same for all segments.

    Attributes:
        problem: The problem.
        layer: The inputs of the layer; matrices that are padded once for all segments are padded.
        h0: The initial hidden state, from `initial_hidden_states`.
        y: The outputs of the layer.
        into: The memory for the gradients of the weights in the layer's flat order, or nothing.
        totals: The memory in which the gradients of each direction's matrices add up, padded; None for memory of a
            segment's own.
        as_batch: Whether the same matrix product of both directions may be made as a batch.
        runs: The gate sums that the recurrent product gives.
    """

    problem: Problem
    layer: Layer
    h0: Tensor
    y: Tensor
    into: tuple[Tensor | None, ...]
    totals: tuple[Tensor | None, ...]
    as_batch: bool
    runs: tuple[Run, ...]

    def gradients_of(self, direction: int) -> tuple[Tensor | None, ...]:
        """Return the memory for the gradients of a direction's weights."""
        each = len(self.into) // len(self.layer.weights)
        return self.into[direction * each : (direction + 1) * each]


class States(NamedTuple):
    """The hidden states that consecutive tokens of a segment read.

    Attributes:
        tokens: The tokens of the segment.
        states: The hidden states [tokens, H].
    """

    tokens: slice
    states: Tensor


class Visit(NamedTuple):
    """A visit of the backward pass to a segment of each direction, with what the segment's steps read.

    Attributes:
        both: The segment of each direction.
        tokens: The steps of the segment and the order of their tokens.
        inputs: The inputs of each direction [tokens, I], I padded, with zeros after the end of sequences.
        states: The hidden states that each direction's steps read, H padded, in one part or two.
        is_first: Whether this is the first segment that is visited.
        is_last: Whether this is the last segment that is visited.
    """

    both: tuple[Segment, ...]
    tokens: Tokens
    inputs: list[Tensor]
    states: list[tuple[States, ...]]
    is_first: bool
    is_last: bool


def visit(layer: SegmentedLayer, both: tuple[Segment, ...], index: int, count: int, scratch: Scratch) -> Visit:
    """Return visit number `index` of `count`, with what the segment's steps read gathered where it must be."""
    inputs, tokens = layer.layer, Tokens(both[0].steps, layer.y.shape[1], by_row=False)
    written: list[tuple[Operand, Tensor]] = []

    def new(operand: Operand) -> Tensor:
        written.append((operand, operand.new(tokens, scratch)))
        return written[-1][1]

    read = []
    for own in dict.fromkeys(both):
        x = inputs.x[own.start : own.stop]
        anything = inputs.lengths is not None and not inputs.ends_in_zeros
        in_place = not anything and x.is_contiguous() and buffers.is_aligned(x.flatten(0, 1))
        read.append(x.flatten(0, 1) if in_place else new(Operand(inputs.x, start=own.start)))
    found = [_states_read(inputs, layer.h0, layer.y, direction, own) for direction, own in enumerate(both)]
    all_tokens = slice(0, tokens.time * tokens.batch)
    states = [(States(all_tokens, new(own)),) if isinstance(own, Operand) else own for own in found]
    if written:
        operands, copies = zip(*written, strict=True)
        launches.write_operands(operands, copies, tokens, inputs.lengths, inputs.resets)
    return Visit(both, tokens, [read[0], read[-1]], states, index == 0, index == count - 1)


def _states_read(layer: Layer, h0: Tensor, y: Tensor, direction: int, own: Segment) -> tuple[States, ...] | Operand:
    """Return the hidden states that a segment's steps read.

    They are views of the outputs of the steps visited before, and of the initial states for the first step of the
    sequence. Where matrix products cannot read them in place, they are an operand that has to be gathered: so with
    resets, because some steps read zeros.

    Args:
        layer: The inputs of the layer, of which the lengths are read: in the reverse direction each row begins at its
            own last step.
        h0: The initial hidden state [D, B, H]; zeros for empty sequences.
        y: The outputs [T, B, D*H].
        direction: 0, or 1 for reverse.
        own: The segment.
    """
    size = h0.shape[2]
    first, outputs = h0[direction], y[..., direction * size : (direction + 1) * size]
    if direction == 0:
        parts = _in_order_of_time(first, outputs, own)
    else:
        parts = _in_reverse(first, outputs, own) if layer.lengths is None else ()
    if layer.resets is None and parts and all(buffers.is_aligned(part.states) for part in parts):
        return parts
    return buffers.states_before(outputs, first, direction, own.start)


def _in_order_of_time(first: Tensor, outputs: Tensor, own: Segment) -> tuple[States, ...]:
    batch, tokens = outputs.shape[1], own.steps * outputs.shape[1]
    if own.start:
        return (States(slice(0, tokens), _rows(outputs[own.start - 1 : own.stop - 1])),)
    begins = States(slice(0, batch), first)
    return (begins, States(slice(batch, tokens), _rows(outputs[: own.stop - 1]))) if own.stop > 1 else (begins,)


def _in_reverse(first: Tensor, outputs: Tensor, own: Segment) -> tuple[States, ...]:
    batch, tokens = outputs.shape[1], own.steps * outputs.shape[1]
    if own.stop < outputs.shape[0]:
        return (States(slice(0, tokens), _rows(outputs[own.start + 1 : own.stop + 1])),)
    begins = States(slice(tokens - batch, tokens), first)
    if own.steps == 1:
        return (begins,)
    return States(slice(0, tokens - batch), _rows(outputs[own.start + 1 :])), begins


def _rows(outputs: Tensor) -> Tensor:
    return outputs.flatten(0, 1)  # a view, because the strides of steps and rows fit


def initial_hidden_states(layer: Layer, scratch: Scratch) -> Tensor:
    """Return h0 [D, B, H] with zeros for empty sequences, for which it may hold anything."""
    return layer.h0 if layer.lengths is None else buffers.zeros_for_empty(layer.h0, layer.lengths, scratch)


def cell_states(layer: Layer, cells: Tensor, both: tuple[Segment, ...], scratch: Scratch) -> Tensor:
    """Return the cell states [D, B, H] that the step of a segment reads that each direction visits first.

    Args:
        layer: The inputs of the layer: c0, contiguous, and the lengths.
        cells: The cell states of all steps [D, T, B, H], H padded.
        both: The segment of each direction.
        scratch: The memory for the result.
    """
    time, size = cells.shape[1], layer.c0.shape[2]
    visited_before = [own.start - 1 if direction == 0 else own.stop for direction, own in enumerate(both)]
    if not any(0 <= step < time for step in visited_before):
        return layer.c0
    if len(both) == 1 and cells.shape[3] == size:
        return cells[:, visited_before[0]]
    found = scratch.new_empty(layer.c0.shape)
    if layer.lengths is None and size == cells.shape[3] and all(0 <= step < time for step in visited_before):
        at_once = [Operand(own, start=step) for own, step in zip(cells, visited_before, strict=True)]
        launches.write_operands(at_once, list(found), Tokens(1, found.shape[1], by_row=False), None)
        return found
    for direction, (step, own) in enumerate(zip(visited_before, both, strict=True)):
        if not 0 <= step < time:
            found[direction].copy_(layer.c0[direction])
            continue
        before = cells[direction, step, :, :size]
        if direction == 0 or layer.lengths is None:
            found[direction].copy_(before)
            continue
        # In the reverse direction a row that ends in the segment, or before it, has not begun yet.
        with scratch.frame():
            begun = torch.gt(layer.lengths, own.stop, out=scratch.new_empty(before.shape[0], dtype=torch.bool))
            torch.where(begun.unsqueeze(1), before, layer.c0[direction], out=found[direction])
    return found


def recompute_sums(
    layer: SegmentedLayer, at: Visit, gates: list[Tensor], room: list[Tensor] | None, scratch: Scratch
) -> None:
    """Recompute the gate sums of a segment, without biases; `room` as in `_in_one_part`."""
    size, read = layer.h0.shape[2], _in_one_part(layer, at, room)
    for direction, (weights, sums) in enumerate(zip(layer.layer.weights, gates, strict=True)):
        with scratch.frame():
            matrix = buffers.pad_gates(weights.w_ih, layer.problem, scratch)
            zeros = matrix_products.memory_for_zeros(layer.problem, scratch)
            deep_products.mm(at.inputs[direction], matrix.t(), of_input(sums, matrix.shape[0]), memory=zeros)
        with scratch.frame():
            w_hh, hidden = buffers.pad_gates(weights.w_hh, layer.problem, scratch), hidden_of(size)
            for part, run in itertools.product(read[direction], layer.runs):
                into = run.columns_of(sums[part.tokens], hidden)
                _add(into, part.states, run.rows_of(w_hh, hidden).t(), begun=run.adds)


def _in_one_part(layer: SegmentedLayer, at: Visit, room: list[Tensor] | None) -> list[tuple[States, ...]]:
    """Return the hidden states that each direction read, copied into one part where they are in two.

    A matrix product for the few rows of a sequence's first step takes longer than a copy of the others.

    Args:
        layer: The layer.
        at: The visit.
        room: Unused memory for each direction [tokens, 4H]; None if there is none, and nothing is copied.
    """
    if room is None:
        return at.states
    size, count = layer.h0.shape[2], at.tokens.time * at.tokens.batch
    found, wanted, copies = [], [], []
    for direction, (own, parts) in enumerate(zip(at.both, at.states, strict=True)):
        if len(parts) == 1:
            found.append(parts)
            continue
        outputs = layer.y[..., direction * size : (direction + 1) * size]
        wanted.append(buffers.states_before(outputs, layer.h0[direction], direction, own.start))
        copies.append(room[direction].flatten()[: count * size].view(count, size))
        found.append((States(slice(0, count), copies[-1]),))
    if wanted:
        launches.write_operands(wanted, copies, at.tokens, layer.layer.lengths, layer.layer.resets)
    return found


def add_to_input_gradient(layer: SegmentedLayer, at: Visit, dgates: list[Tensor], dx: Tensor, scratch: Scratch) -> None:
    """Add a segment's share to the gradient of x [T, B, I]."""
    time, batch, features = dx.shape
    for direction, (own, weights) in enumerate(zip(at.both, layer.layer.weights, strict=True)):
        with scratch.frame():
            w_ih = buffers.pad_gates(weights.w_ih, layer.problem, scratch)
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
                        launches.resized(wide, *rows.shape, into=rows)


def _visited_by_the_other(both: tuple[Segment, ...], direction: int, time: int) -> Segment:
    """Return the steps for which the other direction has written its share of the gradient of x already."""
    if len(both) == 1:
        return Segment(0, 0)
    # In each visit the forward direction is first; it goes from the last step to the first, the reverse one back.
    return Segment(0, both[1].start) if direction == 0 else Segment(both[0].start, time)


def add_to_weight_gradients(
    layer: SegmentedLayer, at: Visit, dgates: list[Tensor], room: list[Tensor] | None, scratch: Scratch
) -> None:
    """Add a segment's share to the gradients of the matrices; after the last segment, copy them without padding.

    `room` is as in `_in_one_part`.
    """
    size, read = layer.h0.shape[2], _in_one_part(layer, at, room)
    hidden, cell = hidden_of(size), layer.problem.cell
    all_tokens = slice(0, at.tokens.time * at.tokens.batch)
    directions = range(len(at.both))
    kinds = (input_runs(cell), [(States(all_tokens, own),) for own in at.inputs]), (layer.runs, read)
    for index, (runs, factors) in enumerate(kinds):
        into = [layer.gradients_of(direction)[index] for direction in directions]
        totals = [layer.totals[2 * direction + index] for direction in directions]
        lasting = [total for total in totals if total is not None]
        if len(lasting) == len(totals) and all(len(parts) == 1 for parts in factors):
            for run in runs:
                made = [
                    matrix_products.Product(
                        ((run.columns_of(own, hidden).t(), parts[0].states),),
                        run.rows_of(total, hidden),
                        adds=not at.is_first,
                    )
                    for own, parts, total in zip(dgates, factors, lasting, strict=False)
                ]
                matrix_products.multiply(made, size, scratch, as_batch=layer.as_batch)
        for direction, own, total in zip(directions, into, totals, strict=True):
            if own is None:
                continue
            with scratch.frame():
                if len(lasting) < len(totals) or any(len(parts) > 1 for parts in factors):
                    total = scratch.new_empty(_padded_shape(own, size)) if total is None else total
                    for (number, part), run in itertools.product(enumerate(factors[direction]), runs):
                        begun = number > 0 or not at.is_first
                        dsums = run.columns_of(dgates[direction][part.tokens], hidden)
                        _add(run.rows_of(total, hidden), dsums.t(), part.states, begun=begun)
                if at.is_last and total is not None and total is not own:
                    buffers.crop_gates(total, size, own.shape[1], own)


def write_biases(layer: SegmentedLayer, totals: Tensor) -> None:
    """Write the gradients of each direction's biases from their totals over segments [D, 4H], H padded."""
    for direction, own in enumerate(totals):
        _, _, *both = (weight for weight in layer.gradients_of(direction) if weight is not None)
        matrix_products.write_biases(layer.problem, own, *both)


def _add(total: Tensor, left: Tensor, right: Tensor, *, begun: bool) -> None:
    """Add a matrix product to a total, or write it as the first one."""
    if begun:
        deep_products.addmm(total, left, right)
    else:
        deep_products.mm(left, right, total)


def totals_of(into: LayerGradients, size: int, directions: int, scratch: Scratch | None) -> tuple[Tensor | None, ...]:
    """Return the memory in which the gradients of the matrices add up over segments.

    Args:
        into: The memory for the gradients, which serves where nothing is padded.
        size: H.
        directions: D.
        scratch: The memory for padded totals; None for a single segment, which needs none.
    """
    each = len(into.weights) // directions
    matrices = [own for index, own in enumerate(into.weights) if index % each < 2] if each else []
    totals: list[Tensor | None] = []
    for own in matrices:
        if own is None or own.shape == _padded_shape(own, size):
            totals.append(own)
        else:
            totals.append(None if scratch is None else scratch.new_empty(_padded_shape(own, size)))
    return tuple(totals)


def _padded_shape(matrix: Tensor, size: int) -> tuple[int, int]:
    return matrix.shape[0] // size * hidden_of(size), hidden_of(matrix.shape[1])

"""What went into the steps of a segment, read from the outputs and cell states that are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import products
from gatewise.kernels.persistent.padding import columns_widened, fitted
from gatewise.kernels.persistent.plan import hidden_of
from gatewise.kernels.persistent.segments import Segment
from gatewise.kernels.stack import Layer


class Part(NamedTuple):
    """Hidden states that went into tokens that lie behind each other.

    Attributes:
        tokens: Of the segment.
        states: Hidden states [tokens, H].
    """

    tokens: slice
    states: Tensor


def hidden_states(
    layer: Layer, h0: Tensor, y: Tensor, direction: int, own: Segment, scratch: Scratch
) -> tuple[Part, ...]:
    """Return the hidden states that went into a segment's steps, as parts one behind the other.

    They are the outputs of the steps visited before, as they lie; the sequence's first step is a part of its own.

    Args:
        layer: Gives the lengths, and the step a reversed sequence begins with.
        h0: Initial hidden state [D, B, H]; zeros for sequences of length 0.
        y: Outputs [T, B, D*H].
        direction: 0, or 1 for reverse.
        own: The segment.
        scratch: For what does not lie there as it is read.
    """
    (time, batch, _), size = y.shape, h0.shape[2]
    first, outputs = h0[direction], y[..., direction * size : (direction + 1) * size]
    tokens = own.steps * batch
    if direction == 0:
        if own.start:
            return (Part(slice(0, tokens), _rows(outputs[own.start - 1 : own.stop - 1])),)
        begins = Part(slice(0, batch), first)
        return (begins, Part(slice(batch, tokens), _rows(outputs[: own.stop - 1]))) if own.stop > 1 else (begins,)
    if layer.lengths is not None:
        return (Part(slice(0, tokens), _reversed_ragged(first, outputs, layer.lengths, own, scratch)),)
    if own.stop < time:
        return (Part(slice(0, tokens), _rows(outputs[own.start + 1 : own.stop + 1])),)
    begins = Part(slice(tokens - batch, tokens), first)
    if own.steps == 1:
        return (begins,)
    return Part(slice(0, tokens - batch), _rows(outputs[own.start + 1 :])), begins


def rounded_up(parts: tuple[Part, ...], scratch: Scratch) -> tuple[Part, ...]:
    """Return hidden states with their columns rounded up; those that are copied for that are then one part."""
    if all(is_wide(part.states) for part in parts):
        return parts
    if len(parts) == 1:
        return (Part(parts[0].tokens, as_wide(parts[0].states, scratch)),)
    wide = scratch.new_empty(max(part.tokens.stop for part in parts), hidden_of(parts[0].states.shape[1]))
    for part in parts:
        fitted(part.states, part.states.shape[0], wide.shape[1], into=wide[part.tokens])
    return (Part(slice(0, wide.shape[0]), wide),)


def as_wide(matrix: Tensor, scratch: Scratch) -> Tensor:
    """Return a matrix with its columns rounded up; where none are missing and rows begin on 16 bytes, as it lies."""
    return matrix if is_wide(matrix) else columns_widened(matrix, scratch)


def is_wide(matrix: Tensor) -> bool:
    """Whether a matrix is as products want it: columns a multiple of 8, rows that begin on 16 bytes."""
    row = matrix.stride(0) * matrix.element_size()
    return matrix.shape[1] % 8 == 0 and matrix.stride(1) == 1 and (row | matrix.data_ptr()) % 16 == 0


def _rows(outputs: Tensor) -> Tensor:
    return outputs.flatten(0, 1)  # a view: steps and rows lie evenly


def _reversed_ragged(first: Tensor, outputs: Tensor, lengths: Tensor, own: Segment, scratch: Scratch) -> Tensor:
    # Each row begins at its own last step. Beyond it gradients are zero, whatever finite values they meet.
    found = scratch.new_empty(own.steps, *first.shape)
    there = outputs[own.start + 1 : own.stop + 1]
    found[: there.shape[0]].copy_(there)
    if there.shape[0] < own.steps:
        found[-1].copy_(first)
    with scratch.frame():
        steps = torch.arange(own.start + 1, own.stop + 1, out=scratch.new_empty(own.steps, dtype=torch.int64))
        begins = torch.eq(
            steps.unsqueeze(1), lengths, out=scratch.new_empty(own.steps, lengths.shape[0], dtype=torch.bool)
        )
        torch.where(begins.unsqueeze(2), first, found, out=found)
    return _rows(found)


def cell_states(layer: Layer, cells: Tensor, both: tuple[Segment, ...], scratch: Scratch) -> Tensor:
    """Return the cell states [D, B, H] that went into the step of a segment that each direction visits first.

    Args:
        layer: Gives c0, contiguous, and the lengths.
        cells: Cell states of all steps [D, T, B, H], H rounded up.
        both: The segment of each direction.
        scratch: For the states.
    """
    time, size = cells.shape[1], layer.c0.shape[2]
    visited_before = [own.start - 1 if direction == 0 else own.stop for direction, own in enumerate(both)]
    if not any(0 <= step < time for step in visited_before):
        return layer.c0
    found = scratch.new_empty(layer.c0.shape)
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


def initial_hidden_states(layer: Layer, scratch: Scratch) -> Tensor:
    """Return h0 [D, B, H] with zeros for sequences of length 0, which may hold anything."""
    return layer.h0 if layer.lengths is None else products.begun(layer.h0, layer.lengths, scratch)

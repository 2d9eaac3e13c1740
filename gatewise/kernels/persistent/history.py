"""What went into the steps of a segment, read from the outputs and cell states that are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import operands, products
from gatewise.kernels.persistent.operands import Operand, states_before
from gatewise.kernels.persistent.padding import is_wide
from gatewise.kernels.persistent.segments import Segment
from gatewise.kernels.persistent.tokens import Tokens
from gatewise.kernels.stack import Layer


class Part(NamedTuple):
    """Hidden states that went into tokens that lie behind each other.

    Attributes:
        tokens: Of the segment.
        states: Hidden states [tokens, H].
    """

    tokens: slice
    states: Tensor


def hidden_states(layer: Layer, h0: Tensor, y: Tensor, direction: int, own: Segment) -> tuple[Part, ...] | Operand:
    """Return the hidden states that went into a segment's steps.

    They are the outputs of the steps visited before, as they lie, in parts one behind the other; the sequence's first
    step is a part of its own. Where they do not lie as products read them they are an operand that is to be written.

    Args:
        layer: Gives the lengths: in the reverse direction each row begins at its own last step.
        h0: Initial hidden state [D, B, H]; zeros for sequences of length 0.
        y: Outputs [T, B, D*H].
        direction: 0, or 1 for reverse.
        own: The segment.
    """
    size = h0.shape[2]
    first, outputs = h0[direction], y[..., direction * size : (direction + 1) * size]
    if direction == 0:
        parts = _in_order_of_time(first, outputs, own)
    else:
        parts = _in_reverse(first, outputs, own) if layer.lengths is None else ()
    if parts and all(is_wide(part.states) for part in parts):
        return parts
    return states_before(outputs, first, direction, own.start)


def _in_order_of_time(first: Tensor, outputs: Tensor, own: Segment) -> tuple[Part, ...]:
    batch, tokens = outputs.shape[1], own.steps * outputs.shape[1]
    if own.start:
        return (Part(slice(0, tokens), _rows(outputs[own.start - 1 : own.stop - 1])),)
    begins = Part(slice(0, batch), first)
    return (begins, Part(slice(batch, tokens), _rows(outputs[: own.stop - 1]))) if own.stop > 1 else (begins,)


def _in_reverse(first: Tensor, outputs: Tensor, own: Segment) -> tuple[Part, ...]:
    batch, tokens = outputs.shape[1], own.steps * outputs.shape[1]
    if own.stop < outputs.shape[0]:
        return (Part(slice(0, tokens), _rows(outputs[own.start + 1 : own.stop + 1])),)
    begins = Part(slice(tokens - batch, tokens), first)
    if own.steps == 1:
        return (begins,)
    return Part(slice(0, tokens - batch), _rows(outputs[own.start + 1 :])), begins


def _rows(outputs: Tensor) -> Tensor:
    return outputs.flatten(0, 1)  # a view: steps and rows lie evenly


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
    if len(both) == 1 and cells.shape[3] == size:
        return cells[:, visited_before[0]]
    found = scratch.new_empty(layer.c0.shape)
    if layer.lengths is None and size == cells.shape[3] and all(0 <= step < time for step in visited_before):
        at_once = [Operand(own, start=step) for own, step in zip(cells, visited_before, strict=True)]
        operands.write(at_once, list(found), Tokens(1, found.shape[1], by_row=False), None)
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


def initial_hidden_states(layer: Layer, scratch: Scratch) -> Tensor:
    """Return h0 [D, B, H] with zeros for sequences of length 0, which may hold anything."""
    return layer.h0 if layer.lengths is None else products.begun(layer.h0, layer.lengths, scratch)

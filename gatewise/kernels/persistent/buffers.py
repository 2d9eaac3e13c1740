"""Prepare tensors for kernels and matrix products: memory order, zero padding, and buffers for gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import Regularised
from gatewise.contract.problem import Problem
from gatewise.contract.saved import OutputGradients, Result
from gatewise.contract.weights import places
from gatewise.kernels.cuda.scratch import Scratch, bytes_together
from gatewise.kernels.persistent import launches
from gatewise.kernels.persistent.launches import Launch, Masks, Operand, Pair, Tokens
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.step import carried_size, drops_hidden
from gatewise.kernels.persistent.sizes.tiling import Tiling
from gatewise.kernels.stack import Layer, LayerGradients

_LARGEST = 2**31  # the kernels index the values of a row's tokens in 32 bits


# The order of tokens.


def order_of(x: Tensor, problem: Problem) -> Tokens:
    """Return the order in which an input [T, B, ...] need not be copied; step by step if it must be in any case."""
    time, batch = x.shape[:2]
    if x.is_contiguous():
        return Tokens(time, batch, by_row=False)
    # What a compiled call keeps must have the strides that were predicted for it. Checkpointed layers slice the steps.
    values = max(4, carried_size(problem) // max(1, problem.hidden_size)) * hidden_of(problem.hidden_size)
    far = time * batch * values >= _LARGEST
    if problem.traced or problem.rebuilds_gates or far:
        return Tokens(time, batch, by_row=False)
    return Tokens(time, batch, by_row=x.transpose(0, 1).is_contiguous())


def order_of_kept(kept: Tensor) -> Tokens:
    """Return the order of the gates or cell states [D, T, B, ...] that a forward pass kept."""
    _, time, batch, _ = kept.shape
    return Tokens(time, batch, by_row=kept.stride(1) < kept.stride(2))


def order_of_outputs(y: Tensor) -> Tokens:
    """Return the order of the outputs [T, B, ...] of a forward pass."""
    (time, batch), (step, row) = y.shape[:2], y.stride()[:2]
    return Tokens(time, batch, by_row=step < row)


def gradients_in_order(above: OutputGradients, tokens: Tokens) -> OutputGradients:
    """Return the gradients of outputs in the order of `tokens`, and of states, contiguous; copied only if needed."""
    y, h_n, c_n = above
    if not tokens.by_row and all(gradient is None or gradient.is_contiguous() for gradient in above):
        return above
    if y is not None:
        y = y.transpose(0, 1).contiguous().transpose(0, 1) if tokens.by_row else y.contiguous()
    return OutputGradients(y, None if h_n is None else h_n.contiguous(), None if c_n is None else c_n.contiguous())


# Inputs as the kernels read them.


def as_read(layer: Layer) -> Layer:
    """Return a layer's inputs with c0 contiguous and the lengths on the device."""
    return layer._replace(c0=layer.c0.contiguous(), lengths=on_device(layer.lengths, layer.x.device))


def on_device(lengths: Tensor | None, device: torch.device) -> Tensor | None:
    """Return lengths as int64, contiguous, on a device."""
    return None if lengths is None else lengths.to(device, torch.int64, non_blocking=True).contiguous()


def with_plain_nan(h0: Tensor, scratch: Scratch) -> Tensor:
    """Return an initial hidden state in which every NaN has the bits of the default one."""
    # Exact products split a number by an addition to its bits, which would turn a NaN with large bits into a number.
    if h0.dtype != torch.float32:
        return h0
    return torch.nan_to_num(h0, math.nan, math.inf, -math.inf, out=scratch.new_empty(h0.shape))


def masks_of(problem: Problem, layer: Layer) -> Masks | None:
    """Return the masks of a layer as the passes read them; None for a cell without masks."""
    cell = problem.cell
    if not isinstance(cell, Regularised):
        return None
    kept, of_steps = layer.masks
    kept = None if kept is None else kept.contiguous()
    scale = 1.0 / (1.0 - cell.recurrent_dropout)
    return Masks(layer.h0.contiguous(), kept, scale, tuple([mask.contiguous() for mask in of_steps]))


def states_before(y: Tensor, first: Tensor, direction: int, start: int = 0) -> Operand:
    """Return the hidden states that each step read, as an operand of a matrix product.

    Args:
        y: The outputs of a direction [T, B, F].
        first: Its initial states [B, F].
        direction: 0, or 1 for reverse.
        start: The number of steps before the first one, as in `Operand`.
    """
    return Operand(y, first.contiguous(), 1 if direction else -1, start)


def last_steps(lengths: Tensor) -> Tensor:
    """Return the last step of each sequence; 0 for an empty sequence."""
    return (lengths - 1).clamp(min=0)


def zeros_for_empty(states: Tensor, lengths: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return states [D, B, H] with zeros for empty sequences, for which they may hold anything."""
    empty = torch.le(lengths, 0, out=(scratch or lengths).new_empty(lengths.shape, dtype=torch.bool))
    return (scratch or states).new_empty(states.shape).copy_(states).masked_fill_(empty.unsqueeze(1), 0)


def zeros_after_ends(x: Tensor, lengths: Tensor) -> Tensor:
    """Return x [T, B, I] with zeros after the end of each sequence."""
    # The values there may be anything, and 0 x NaN is NaN.
    (time, batch, _) = x.shape
    steps = torch.arange(0, time, out=lengths.new_empty(time, dtype=torch.int64)).unsqueeze(1)
    outside = torch.ge(steps, lengths, out=lengths.new_empty(time, batch, dtype=torch.bool))
    return torch.empty_like(x).copy_(x).masked_fill_(outside.unsqueeze(2), 0)


def zeros_where_episodes_begin(values: Tensor, direction: int, resets: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Replace by zeros, in place, the values [T, B, F] of steps that read zeros instead of the states before them.

    Args:
        values: The states before each step as the step reads them, or the gradients of these states.
        direction: 0, or 1 for reverse, where a reset separates the step before it from the step that it marks.
        resets: The steps at which episodes begin [T, B], or None, which changes nothing.
        lengths: The sequence lengths [B] on the device, or None.
    """
    if resets is None:
        return values
    if direction == 0:
        return values.masked_fill_(resets.unsqueeze(2), 0)
    borders = resets[1:]
    if lengths is not None:  # a row starts at its own last step
        steps = torch.arange(1, resets.shape[0], out=lengths.new_empty(borders.shape[0])).unsqueeze(1)
        borders = torch.lt(steps, lengths, out=torch.empty_like(borders)).logical_and_(borders)
    values[:-1].masked_fill_(borders.unsqueeze(2), 0)
    return values


# Padding: tensor cores want sizes that are multiples of 8.


def pad_columns(matrix: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return a matrix with its number of columns padded to a multiple of 8."""
    return launches.resized(matrix, matrix.shape[0], hidden_of(matrix.shape[1]), scratch=scratch)


def pad_columns_unless_aligned(matrix: Tensor, scratch: Scratch) -> Tensor:
    """Return a matrix itself if `is_aligned`, otherwise with its columns padded."""
    return matrix if is_aligned(matrix) else pad_columns(matrix, scratch)


def is_aligned(matrix: Tensor) -> bool:
    """Whether matrix products read a matrix fast: its columns are a multiple of 8, its rows of 16 bytes."""
    row = matrix.stride(0) * matrix.element_size()
    return matrix.shape[1] % 8 == 0 and matrix.stride(1) == 1 and (row | matrix.data_ptr()) % 16 == 0


def pad_gates(matrix: Tensor, problem: Problem, scratch: Scratch | None = None, into: Tensor | None = None) -> Tensor:
    """Return a matrix [G * H, any] with the rows of each gate and the columns padded; H may be padded already."""
    sizes = hidden_of(problem.hidden_size), hidden_of(matrix.shape[1])
    return launches.resized(matrix, *sizes, len(problem.cell.gates), scratch=scratch, into=into)


def pad_gates_of_directions(
    matrices: Sequence[Tensor], problem: Problem, scratch: Scratch, into: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return the matrices of each direction as `pad_gates` does; padded in one piece of memory, as batches lie."""
    rows, columns = len(problem.cell.gates) * hidden_of(problem.hidden_size), hidden_of(matrices[0].shape[1])
    if not into and any(matrix.shape != (rows, columns) or matrix.data_ptr() % 16 for matrix in matrices):
        into = scratch.new_empty(len(matrices), rows, columns).unbind()
    places = into or [None] * len(matrices)
    return [pad_gates(own, problem, scratch, place) for own, place in zip(matrices, places, strict=True)]


def crop_gates(matrix: Tensor, size: int, columns: int, into: Tensor | None = None) -> Tensor:
    """Return a matrix [G * H, any] without its padding: `size` rows of each gate, and `columns`."""
    return launches.resized(matrix, size, columns, matrix.shape[0] // hidden_of(size), into=into)


# Memory for results and gradients.


class Entered(NamedTuple):
    """The hidden states as they enter the recurrent products, where recurrent dropout changes them.

    Attributes:
        states: Those of all steps [T, B, D*H], H padded.
        first: Those before the first step [D, B, H], H not padded.
    """

    states: Tensor
    first: Tensor


def with_entered(y: Tensor, layer: Layer, entered: Entered | None) -> tuple[Tensor, Layer]:
    """Return the hidden states of all steps, and the layer with those before the first step, as products read them."""
    return (y, layer) if entered is None else (entered.states, layer._replace(h0=entered.first))


def new_entered(problem: Problem, like: Tensor | Scratch, tokens: Tokens) -> tuple[Tensor, ...]:
    """Return uninitialised memory for the tensors of `Entered`; none without recurrent dropout."""
    if not drops_hidden(problem.cell):
        return ()
    directions, size = problem.num_directions, problem.hidden_size
    states = tokens.new(like, width=directions * hidden_of(size))
    return states, like.new_empty(directions, tokens.batch, size)


class Exchange(NamedTuple):
    """The memory through which the blocks of a forward pass exchange hidden states.

    Attributes:
        states: The hidden states: from `new_exchange`; or the output itself; or, with recurrent dropout, the states of
            `Entered`.
        places: The address of those of each direction.
        width: The number of values of a token, of all directions; if rows are interleaved, those of one direction.
        unpadded: The output that the pass writes in addition, or None if it is `states`.
        h0: The initial hidden state that enters the first product, from `initial_states`.
    """

    states: Tensor
    places: Pair
    width: int
    unpadded: Tensor | None
    h0: Tensor


def exchange_of(
    problem: Problem,
    layer: Layer,
    y: Tensor,
    masks: Masks | None,
    entered: tuple[Tensor, ...] | None,
    tokens: Tokens,
    scratch: Scratch,
    launch: Launch,
) -> Exchange:
    """Return the memory through which the blocks of a forward pass exchange hidden states, and the initial ones.

    Args:
        problem: The problem.
        layer: The inputs of the layer.
        y: The output of the layer.
        masks: The masks of the layer; None for a cell without masks.
        entered: The tensors of `Entered` that are kept for the backward pass; None or empty if there are none.
        tokens: The order of the tokens.
        scratch: The memory of the call.
        launch: The pass.
    """
    size, directions, h0, unpadded = problem.hidden_size, problem.num_directions, layer.h0, y
    if masks is not None and masks.kept is not None:
        states, h0 = entered or new_entered(problem, scratch, tokens)
        torch.mul(layer.h0, masks.kept, out=h0).mul_(masks.scale)
    elif launch.interleaved or size != exchanged_width(tokens.time, launch.tiling):
        states = new_exchange(launch, directions, tokens, scratch)
    else:
        states, unpadded = y, None
    places = launches.planes(states) if launch.interleaved else launches.columns(states, directions)
    return Exchange(states, places, states.shape[-1], unpadded, initial_states(launch, h0, scratch))


def new_exchange(launch: Launch, directions: int, tokens: Tokens, scratch: Scratch) -> Tensor:
    """Return uninitialised memory for the hidden states that blocks exchange: interleaved, or tokens in padded rows."""
    if launch.interleaved:
        return scratch.new_empty(launch.exchange_shape(directions, tokens.time))
    return tokens.new(scratch, width=directions * exchanged_width(tokens.time, launch.tiling))


def exchanged_gradients(
    launch: Launch, parts: int, tokens: Tokens, scratch: Scratch, like: Tensor, *others: int
) -> tuple[Tensor, Scratch]:
    """Return memory in which blocks exchange the gradients of gate sums, and further memory, filled in one launch.

    Args:
        launch: The backward pass.
        parts: The number of directions, or of layers.
        tokens: The tokens.
        scratch: The memory of the call.
        like: A tensor with the dtype and the device.
        others: The sizes in bytes of the further tensors.

    Returns:
        The gradients [parts, T, B, 4H] in the order of the tokens, or, if rows are interleaved, of
        `Launch.exchange_shape`; and the memory for the others.
    """
    shape = parts, tokens.time, tokens.batch, 4 * launch.tiling.hidden
    if launch.interleaved:
        shape = launch.exchange_shape(parts, tokens.time)
    room = unwritten(like, scratch, math.prod(shape) * like.element_size(), *others)
    return room.new_empty(shape) if launch.interleaved else tokens.new(room, parts, width=shape[-1]), room


def initial_states(launch: Launch, h0: Tensor, scratch: Scratch) -> Tensor:
    """Return initial hidden states h0 [D, B, H] as a pass reads them.

    They are contiguous if rows are interleaved. Otherwise they are [D * B, H padded], and every NaN of float32 has the
    same bits.
    """
    if launch.interleaved:
        return h0.contiguous()
    return with_plain_nan(pad_columns(h0.flatten(0, 1), scratch), scratch)


def exchanged_width(time: int, tiling: Tiling) -> int:
    """Return the values of a batch row of the hidden states that the blocks of a forward pass exchange.

    Args:
        time: The number of steps; in a single one nothing is exchanged.
        tiling: The tiling of the pass.
    """
    return tiling.row_width if time > 1 else tiling.hidden


def new_result(problem: Problem, x: Tensor, tokens: Tokens, kept: tuple[Tensor, ...]) -> Result:
    """Return uninitialised outputs and final states of one layer, with the memory for what it keeps."""
    y = tokens.new(x, width=problem.num_directions * problem.hidden_size)
    rows = problem.num_directions, tokens.batch
    return Result(y, x.new_empty(*rows, problem.hidden_size), x.new_empty(*rows, carried_size(problem)), kept)


def new_weight_gradients(layer: Layer, *, apart: bool = False) -> tuple[Tensor, ...]:
    """Return uninitialised gradients of a layer's weights, except projections, in its flat order.

    Args:
        layer: The inputs of the layer.
        apart: Whether each is an allocation of its own; otherwise all are views of one buffer.
    """
    weights = [tensor for own in layer.weights for tensor in own._replace(w_hr=None).tensors()]
    if apart:
        return tuple([weight.new_empty(weight.shape) for weight in weights])
    return views_like(weights[0].new_empty(sum([weight.numel() for weight in weights])), weights)


def views_like(buffer: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return consecutive views of a buffer in the shapes of weights."""
    return tuple([buffer.as_strided(*place) for place in places([weight.shape for weight in weights])[0]])


def weight_shapes(problem: Problem) -> list[tuple[int, ...]]:
    """Return the shapes of all weights in flat order."""
    gates, shapes = problem.gate_rows, []
    for layer in range(problem.num_layers):
        own = [(gates, problem.layer_input_size(layer)), (gates, problem.state_size)]
        own += [(gates,)] * (2 * problem.bias) + [(problem.proj_size, problem.hidden_size)] * (problem.proj_size > 0)
        own += [(problem.hidden_size,)] * len(problem.cell.parameters)
        shapes += own * problem.num_directions
    return shapes


def bias_gradients_of(problem: Problem, into: LayerGradients, parts: int) -> list[tuple[Tensor, Tensor]]:
    """Return the memory for the gradients of both biases of each direction, or layer; nothing if they are not wanted.

    Args:
        problem: The problem.
        into: The memory for all gradients.
        parts: The number of directions, or of layers.
    """
    if not problem.bias or not into.weights:
        return []
    weights = [weight for weight in into.weights if weight is not None]
    each = len(weights) // parts
    return [(weights[first + 2], weights[first + 3]) for first in range(0, len(weights), each)]


def new_counters(directions: int, blocks: int, scratch: Scratch) -> Tensor | None:
    """Return counters [D, blocks], filled by `fill_unwritten`; None if there are no blocks to count."""
    return launches.fill_unwritten(scratch.new_empty(directions, blocks, dtype=torch.int32)) if blocks else None


def new_bias_sums(together: int, directions: int, hidden: int, scratch: Scratch, count: int) -> Tensor:
    """Return uninitialised memory for partial sums of the gradients of the biases, as backward.cu describes it.

    Args:
        together: The number of groups of batch rows at work at the same time.
        directions: The number of directions, or of layers.
        hidden: H, padded.
        scratch: The memory.
        count: The number of launches.
    """
    if together > 1:
        return scratch.new_empty(count, together, directions, 4 * hidden, dtype=torch.float32)
    return scratch.new_empty(count, 2, directions, 4 * hidden)


def unwritten(like: Tensor, scratch: Scratch, *sizes: int) -> Scratch:
    """Return memory for tensors of these sizes in bytes, filled by `fill_unwritten` in one launch."""
    memory = launches.fill_unwritten(scratch.new_empty(bytes_together(sizes), dtype=torch.uint8))
    return Scratch(like, memory)

"""One layer, both directions: library products around one launch that goes through the sequence."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs, OutputGradients, Result
from gatewise.kernels.cuda.scratch import Scratch, bytes_together
from gatewise.kernels.persistent import products
from gatewise.kernels.persistent.memory import keeps_matrices, overwrites_gates
from gatewise.kernels.persistent.padding import columns_widened
from gatewise.kernels.persistent.passes import (
    Matrices,
    backward_launch,
    backward_pass,
    columns,
    forward_launch,
    forward_pass,
    planes,
)
from gatewise.kernels.persistent.plan import hidden_of
from gatewise.kernels.persistent.row_order import longest_first
from gatewise.kernels.persistent.tokens import Tokens, fill_unwritten, order_of, order_of_kept
from gatewise.kernels.stack import Layer, LayerGradients


def forward(problem: Problem, layer: Layer, first: list[Tensor] | None = None) -> Result:
    """Compute one layer; keep the activated gates [D, T, B, 4H] and cells [D, T, B, H], H rounded up to 8.

    Input weights [4H, I] that had to be rounded up may be kept too, one for each direction.

    Args:
        problem: What is asked.
        layer: Its inputs.
        first: Of each direction, what is added to the gate sums of its first step [B, 4H], H rounded up; or None.
    """
    x, directions = layer.x, len(layer.weights)
    tokens = order_of(x, problem)
    kept = new_kept(problem, x.shape[2], x, tokens) if problem.needs_grad else ()
    size = problem.hidden_size
    y = tokens.new(x, width=directions * size)
    h_n, c_n = (x.new_empty(directions, tokens.batch, size) for _ in range(2))
    result = Result(y, h_n, c_n, kept)
    layer = layer._replace(c0=layer.c0.contiguous(), lengths=on_device(layer.lengths, x.device))
    compute(problem, layer, tokens, result, Scratch(x), first)
    return result


def new_kept(problem: Problem, features: int, like: Tensor, tokens: Tokens) -> tuple[Tensor, ...]:
    """Return unwritten gates and cells for the backward pass of a layer, and input weights where they are kept."""
    hidden, directions = hidden_of(problem.hidden_size), problem.num_directions
    kept = tokens.new(like, directions, width=4 * hidden), tokens.new(like, directions, width=hidden)
    if not keeps_matrices(problem):
        return kept
    return *kept, *[like.new_empty(len(problem.cell.gates) * hidden, hidden_of(features)) for _ in range(directions)]


def compute(
    problem: Problem,
    layer: Layer,
    tokens: Tokens,
    into: Result,
    scratch: Scratch,
    first: list[Tensor] | None = None,
) -> None:
    """Compute one layer into memory that is there.

    Args:
        problem: What is asked.
        layer: Its inputs, c0 contiguous, lengths as `on_device` returns them.
        tokens: The order of x, and of the tensors of `into`.
        into: Outputs; `kept` is what `new_kept` returns, or nothing.
        scratch: For all else.
        first: As in `forward`.
    """
    directions, device = len(layer.weights), layer.x.device
    size, hidden = problem.hidden_size, hidden_of(problem.hidden_size)
    gates, cells, *matrices = into.kept or (tokens.new(scratch, directions, width=4 * hidden), None)
    flat = columns_widened(tokens.flat(layer.x), scratch)
    with products.in_precision_of(problem):
        for direction, (share, weights) in enumerate(zip(gates, layer.weights, strict=True)):
            keep = matrices[direction] if matrices else None
            products.input_sums(problem, flat, weights, tokens.flat(share), scratch, keep)
    if first is not None:
        products.add_to_first_steps(gates, first, layer.lengths)
    y, narrow = into.y, None
    if size != hidden:
        y, narrow = tokens.new(scratch, width=directions * hidden), into.y
    if tokens.time > 1:  # or else nothing is exchanged
        fill_unwritten(y)
    h0 = plain_nan(columns_widened(layer.h0.flatten(0, 1), scratch), scratch)
    launch = forward_launch(problem, tokens.batch, directions, layer.lengths is not None, device)
    forward_pass(
        launch,
        Matrices(layer.weights),
        tokens,
        gates=planes(gates),
        y=columns(y, directions),
        narrow=columns(narrow, directions),
        cells=planes(cells),
        h0=h0,
        c0=layer.c0,
        h_n=into.h_n,
        c_n=into.c_n,
        lengths=layer.lengths,
        order=longest_first(launch, layer.lengths, scratch),
        keep_gates=cells is not None,
    )


def backward(problem: Problem, layer: Layer, result: Result, above: OutputGradients, needs: Needs) -> LayerGradients:
    """Compute one layer's gradients: one launch for those of the gate sums, then products over all steps at once."""
    x, tokens = layer.x, order_of_kept(result.kept[0])
    into = LayerGradients(
        tokens.new(x, width=x.shape[2]) if needs.x else None,
        torch.empty_like(layer.c0, memory_format=torch.contiguous_format),
        torch.empty_like(layer.c0, memory_format=torch.contiguous_format),
        products.new_weight_gradients(layer, apart=problem.traced) if needs.weights else (),
    )
    layer = layer._replace(c0=layer.c0.contiguous(), lengths=on_device(layer.lengths, x.device))
    differentiate(problem, layer, result, in_order(above, tokens), into, Scratch(x))
    return LayerGradients(
        into.x,
        into.h0 if needs.state else None,
        into.c0 if needs.state else None,
        into.weights or (None,) * (len(layer.weights) * problem.weights_per_direction),
    )


def differentiate(
    problem: Problem,
    layer: Layer,
    result: Result,
    above: OutputGradients,
    into: LayerGradients,
    scratch: Scratch,
) -> None:
    """Compute one layer's gradients into memory that is there.

    Args:
        problem: What is asked.
        layer: Its inputs, c0 contiguous, lengths as `on_device` returns them.
        result: Its outputs.
        above: Gradients of them, as `in_order` returns them.
        into: Gradients; x is None and weights are empty if they are not wanted.
        scratch: For all else.
    """
    weights = [weight for weight in into.weights if weight is not None]
    with scratch.frame(), products.in_precision_of(problem):
        found = gate_gradients(problem, layer, result.kept, above, scratch, into)
        if into.x is not None:
            dsums = [found.tokens.flat(share) for share in found.sums]
            dx = found.tokens.flat(into.x)
            products.input_gradient(problem, dsums, layer.weights, dx, scratch, result.kept[2:])
        if weights:
            products.weight_gradients(
                problem, layer, result.y, found.sums, found.bias, layer.lengths, found.tokens, weights, scratch
            )


class GateGradients(NamedTuple):
    """What one launch finds, H rounded up.

    Attributes:
        sums: Gradients of the gate sums [D, T, B, 4H].
        bias: Of both biases, which are one [D, 4H]; None where they were written to their places.
        h0: Of the initial hidden state [D, B, H], not rounded up.
        c0: Of the initial cell state.
        tokens: The order of `sums`.
    """

    sums: Tensor
    bias: Tensor | None
    h0: Tensor
    c0: Tensor
    tokens: Tokens


def gate_gradients(
    problem: Problem,
    layer: Layer,
    kept: tuple[Tensor, ...],
    above: OutputGradients,
    scratch: Scratch,
    into: LayerGradients | None = None,
) -> GateGradients:
    """Go back through the sequence; `into` is where gradients of the state and of biases are put, if it is given.

    What it finds may take the place of the gates that were kept.
    """
    (gates, cells), directions, device = kept[:2], len(layer.weights), layer.x.device
    hidden, tokens = hidden_of(problem.hidden_size), order_of_kept(gates)
    launch = backward_launch(problem, tokens.batch, directions, layer.lengths is not None, device)
    together = launch.cut.together
    places = places_of_biases(problem, into)
    counters = launch.cut.blocks if places and together > 1 else 0
    if overwrites_gates(problem):
        dgates, done = gates, new_counters(directions, counters, scratch)
    else:
        dgates, done = _unwritten(tokens, directions, 4 * hidden, counters, scratch, layer.x)
    dh0, dc0 = (
        found if found is not None else scratch.new_empty(directions, tokens.batch, problem.hidden_size)
        for found in ((None, None) if into is None else into[1:3])
    )
    in_place = places and together == 1
    bias = None if in_place else products.new_bias_gradients(together, directions, hidden, scratch, 1)[0]
    backward_pass(
        launch,
        Matrices(layer.weights),
        tokens,
        gates=planes(gates),
        cells=planes(cells),
        dy=columns(above.y, directions),
        dgates=planes(dgates),
        c0=layer.c0,
        dh_n=above.h_n,
        dc_n=above.c_n,
        dh0=dh0,
        dc0=dc0,
        bias=bias,
        biases=places,
        done=done,
        lengths=layer.lengths,
        order=longest_first(launch, layer.lengths, scratch),
    )
    if bias is None or places:
        left = None
    elif together > 1:
        left = torch.sum(bias, 0, out=scratch.new_empty(directions, 4 * hidden, dtype=torch.float32))
    else:
        left = bias[0]
    return GateGradients(dgates, left, dh0, dc0, tokens)


def places_of_biases(problem: Problem, into: LayerGradients | None) -> list[tuple[Tensor, Tensor]]:
    """Return where gradients of both biases of each direction are wanted; nothing if they are not, or nowhere yet."""
    if into is None or not problem.bias or not into.weights:
        return []
    weights = [weight for weight in into.weights if weight is not None]
    each = len(weights) // problem.num_directions
    return [(weights[first + 2], weights[first + 3]) for first in range(0, len(weights), each)]


def new_counters(directions: int, counters: int, scratch: Scratch) -> Tensor | None:
    """Return counters [D, counters], filled, if there are any."""
    return fill_unwritten(scratch.new_empty(directions, counters, dtype=torch.int32)) if counters else None


def _unwritten(
    tokens: Tokens, directions: int, width: int, counters: int, scratch: Scratch, like: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return a tensor [D, T, B, width], and counters [D, counters] if there are any, filled together."""
    if not counters:
        return fill_unwritten(tokens.new(scratch, directions, width=width)), None
    values = directions * tokens.time * tokens.batch * width
    sizes = values * like.element_size(), directions * counters * torch.int32.itemsize
    memory = fill_unwritten(scratch.new_empty(bytes_together(sizes), dtype=torch.uint8))
    parts = Scratch(like, memory)
    return tokens.new(parts, directions, width=width), parts.new_empty(directions, counters, dtype=torch.int32)


def in_order(above: OutputGradients, tokens: Tokens) -> OutputGradients:
    """Return gradients of outputs as the kernel reads them; a copy only of what lies otherwise."""
    y, h_n, c_n = above
    if not tokens.by_row and all(gradient is None or gradient.is_contiguous() for gradient in above):
        return above
    if y is not None:
        y = y.transpose(0, 1).contiguous().transpose(0, 1) if tokens.by_row else y.contiguous()
    return OutputGradients(y, None if h_n is None else h_n.contiguous(), None if c_n is None else c_n.contiguous())


def plain_nan(h0: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return an initial hidden state as the kernel can read it."""
    # Exact products part a number by adding to its bits, which would make a number of a NaN with large ones.
    if h0.dtype != torch.float32:
        return h0
    made = (scratch or h0).new_empty(h0.shape)
    return torch.nan_to_num(h0, math.nan, math.inf, -math.inf, out=made)


def on_device(lengths: Tensor | None, device: torch.device) -> Tensor | None:
    """Return lengths as the kernels read them."""
    return None if lengths is None else lengths.to(device, torch.int64, non_blocking=True).contiguous()

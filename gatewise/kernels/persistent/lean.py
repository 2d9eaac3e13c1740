"""One layer in little memory: segment by segment, keeping cell states, and the gates of as many steps as fit.

The forward pass needs gates for a segment at a time, and keeps those of the steps it visits last. The backward pass,
which visits those first, makes the others again in their place, from x and the outputs, in two products a segment.
Gradients of the weights add up over segments. `memory.lean_cut` says where a sequence is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs, OutputGradients, Result
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import history, products
from gatewise.kernels.persistent.activation import activate
from gatewise.kernels.persistent.exactness import exact_products
from gatewise.kernels.persistent.layer import in_order as layer_in_order
from gatewise.kernels.persistent.layer import new_counters, on_device, places_of_biases, plain_nan
from gatewise.kernels.persistent.lean_products import (
    Call,
    add_to_inputs,
    add_to_weights,
    make_sums,
    place,
    totals_of,
    write_biases,
)
from gatewise.kernels.persistent.memory import holds_matrices, lean_cut, lean_forward_pieces, overwrites_gates
from gatewise.kernels.persistent.padding import as_wide, columns_widened, gates_widened
from gatewise.kernels.persistent.passes import (
    Matrices,
    Pair,
    backward_launch,
    backward_pass,
    columns,
    forward_launch,
    forward_pass,
    pair,
    planes,
)
from gatewise.kernels.persistent.plan import hidden_of
from gatewise.kernels.persistent.row_order import longest_first
from gatewise.kernels.persistent.segments import Segment, visited_together
from gatewise.kernels.persistent.tokens import Tokens, fill_unwritten, order_of
from gatewise.kernels.stack import Layer, LayerGradients
from gatewise.kernels.sums import of_input, recurrent_runs


def forward(problem: Problem, layer: Layer) -> Result:
    """Compute one layer for training; keep its cells [D, T, B, H], H rounded up to 8, and some steps' gates."""
    x, tokens = layer.x, order_of(layer.x, problem)
    h_n, c_n = (torch.empty_like(layer.c0, memory_format=torch.contiguous_format) for _ in range(2))
    y = tokens.new(x, width=problem.output_size)
    result = Result(y, h_n, c_n, new_kept(problem, x.shape[2], x, tokens))
    compute(problem, _ready(layer), tokens, result, Scratch(x))
    return result


def new_kept(problem: Problem, features: int, like: Tensor, tokens: Tokens) -> tuple[Tensor, ...]:
    """Return unwritten cells for the backward pass of a layer, and gates of the steps visited last if any are kept."""
    directions, hidden, steps = problem.num_directions, hidden_of(problem.hidden_size), lean_cut(problem).kept_steps
    cells = tokens.new(like, directions, width=hidden)
    return (cells, tokens._replace(time=steps).new(like, directions, width=4 * hidden)) if steps else (cells,)


def compute(problem: Problem, layer: Layer, tokens: Tokens, into: Result, scratch: Scratch) -> None:
    """Compute one layer into memory that is there.

    Args:
        problem: What is asked.
        layer: Its inputs, c0 contiguous, lengths as `on_device` returns them.
        tokens: The order of the tensors of `into`, step by step; that of x may be another.
        into: Outputs; `kept` is what `new_kept` returns, step by step.
        scratch: For all else.
    """
    (cells, *kept), y, directions = into.kept, into.y, len(layer.weights)
    size, hidden = problem.hidden_size, hidden_of(problem.hidden_size)
    time, batch, _ = tokens
    pieces = lean_forward_pieces(problem)
    whole = size == hidden
    if whole:
        fill_unwritten(y)
    in_place = kept[0].flatten(1, 2) if kept and len(pieces) > 1 else None
    room = max(pieces if in_place is None else pieces[:-1])
    elsewhere = scratch.new_empty(directions, room * batch, 4 * hidden)
    wide = None if whole else scratch.new_empty(max(pieces), batch, directions * hidden)
    matrices = Matrices(layer.weights)
    launch = forward_launch(problem, batch, directions, layer.lengths is not None, y.device)
    order = longest_first(launch, layer.lengths, scratch)
    w_ih = [gates_widened(own.w_ih, problem, scratch).t() for own in layer.weights]
    h, c = layer.h0, layer.c0
    pairs = visited_together(pieces, directions)
    for both in pairs:
        stretch, is_last = Tokens(both[0].steps, batch, by_row=False), both is pairs[-1]
        gates = in_place if is_last and in_place is not None else elsewhere
        with scratch.frame(), products.in_precision_of(problem):
            for share, weights, own in zip(gates, w_ih, both, strict=True):
                with scratch.frame():
                    sums = of_input(share[: stretch.time * batch], weights.shape[1])
                    deep_products.mm(_inputs(layer, own, scratch), weights, sums)
        outputs = _shares([y[own.start : own.stop] for own in both], size)
        h0, c0 = plain_nan(columns_widened(h.flatten(0, 1), scratch), scratch), c
        h, c = into[1:3] if is_last else [scratch.new_empty(directions, batch, size) for _ in range(2)]
        forward_pass(
            launch,
            matrices,
            stretch,
            gates=planes(gates),
            y=outputs if wide is None else columns(fill_unwritten(wide), directions),
            narrow=(None, None) if wide is None else outputs,
            cells=_cells_of(cells, both),
            h0=h0,
            c0=c0,
            h_n=h,
            c_n=c,
            lengths=layer.lengths,
            order=order,
            starts=_starts(both),
            keep_gates=bool(kept) and is_last,
        )
    if kept and in_place is None:
        for direction, share in enumerate(kept[0]):
            first = 0 if direction else time - kept[0].shape[1]
            share.copy_(elsewhere[direction].unflatten(0, (time, batch))[first : first + kept[0].shape[1]])


def backward(problem: Problem, layer: Layer, result: Result, above: OutputGradients, needs: Needs) -> LayerGradients:
    """Compute one layer's gradients, from the last segment to the first."""
    x, tokens = layer.x, order_of(layer.x, problem)
    into = LayerGradients(
        tokens.new(x, width=x.shape[2]) if needs.x else None,
        torch.empty_like(layer.c0, memory_format=torch.contiguous_format) if needs.state else None,
        torch.empty_like(layer.c0, memory_format=torch.contiguous_format) if needs.state else None,
        products.new_weight_gradients(layer, apart=problem.traced) if needs.weights else (),
    )
    differentiate(problem, _ready(layer), result, in_order(above, tokens), into, Scratch(x))
    return into._replace(weights=into.weights or (None,) * (len(layer.weights) * problem.weights_per_direction))


def in_order(above: OutputGradients, tokens: Tokens) -> OutputGradients:
    """Return gradients of outputs as `differentiate` reads them: those of y step by step or row by row."""
    y, h_n, c_n = layer_in_order(above._replace(y=None), tokens)
    dy = above.y
    if dy is not None:
        y = dy if dy.transpose(0, 1).is_contiguous() else dy.contiguous()
    return OutputGradients(y, h_n, c_n)


def differentiate(
    problem: Problem,
    layer: Layer,
    result: Result,
    above: OutputGradients,
    into: LayerGradients,
    scratch: Scratch,
) -> None:
    """Compute one layer's gradients into memory that is there, from the last segment to the first.

    Args:
        problem: What is asked.
        layer: Its inputs, c0 contiguous, lengths as `on_device` returns them.
        result: Its outputs; kept gates are used up.
        above: Gradients of them, as `in_order` returns them.
        into: Gradients; what is not wanted is None, weights are empty.
        scratch: For all else.
    """
    (cells, *kept), (time, batch, _), directions = result.kept, layer.x.shape, len(layer.weights)
    size, hidden = problem.hidden_size, hidden_of(problem.hidden_size)
    cut = lean_cut(problem)
    pairs, count = visited_together(cut.pieces, directions), cut.segments
    matrices = Matrices(layer.weights)
    launch = backward_launch(problem, batch, directions, layer.lengths is not None, cells.device)
    with scratch.frame(), products.in_precision_of(problem):
        gates = kept[0].flatten(1, 2) if kept else scratch.new_empty(directions, max(cut.rebuilt) * batch, 4 * hidden)
        over = overwrites_gates(problem)
        dgates = gates if over else scratch.new_empty(directions, cut.longest * batch, 4 * hidden)
        biases = products.new_bias_gradients(launch.cut.together, directions, hidden, scratch, count)
        places = places_of_biases(problem, into) if launch.cut.together > 1 else []
        done = new_counters(directions, launch.cut.blocks if places else 0, scratch)
        order = longest_first(launch, layer.lengths, scratch)
        between = [[scratch.new_empty(layer.c0.shape) for _ in ("h", "c")] for _ in range(2)]
        call = Call(
            layer._replace(weights=_fitted(problem, layer, holds_matrices(problem), count > 1, scratch)),
            history.initial_hidden_states(layer, scratch),
            result.y,
            into.weights,
            totals_of(into, size, directions, scratch if count > 1 else None),
            not exact_products(problem),
            problem,
            recurrent_runs(problem.cell),
        )
        dh, dc = above.h_n, above.c_n
        for index, both in enumerate(reversed(pairs)):
            dh_n, dc_n = dh, dc
            dh, dc = (
                end if both is pairs[0] and end is not None else own
                for end, own in zip(into[1:3], between[index % 2], strict=True)
            )
            with scratch.frame():
                at = place(call, both, index, len(pairs), scratch)
                if index < len(cut.kept):
                    own_gates = _within(kept[0], both, time)
                    dsums = own_gates if over else _tokens_of(dgates, at.tokens)
                    if not over:
                        fill_unwritten(dgates if directions > 1 else dsums[0])
                else:
                    own_gates, dsums = _tokens_of(gates, at.tokens), _tokens_of(dgates, at.tokens)
                    make_sums(call, at, own_gates, None if over else dsums, scratch)
                    activate(problem, matrices, gates, None if over else dgates, at.tokens.time * batch)
                given = None if above.y is None else [_lying(above.y[own.start : own.stop], scratch) for own in both]
                backward_pass(
                    launch,
                    matrices,
                    at.tokens,
                    gates=_addresses(own_gates),
                    cells=_cells_of(cells, both),
                    dy=(None, None) if given is None else _shares(given, size),
                    dgates=_addresses(dsums),
                    c0=history.cell_states(layer, cells, both, scratch),
                    dh_n=dh_n,
                    dc_n=dc_n,
                    dh0=dh,
                    dc0=dc,
                    bias=biases[index],
                    biases=places if both is pairs[0] else (),
                    done=done,
                    earlier=biases[:index],
                    lengths=layer.lengths,
                    order=order,
                    starts=_starts(both),
                )
                if into.x is not None:
                    add_to_inputs(call, at, dsums, into.x, scratch)
                if into.weights:
                    add_to_weights(call, at, dsums, None if over else own_gates, scratch)
        if problem.bias and into.weights and not places:
            write_biases(call, products.summed_bias_gradients(biases, launch.cut.together, scratch))


def _fitted(problem: Problem, layer: Layer, inputs: bool, recurrent: bool, scratch: Scratch) -> list[DirectionWeights]:
    w_ih = [gates_widened(own.w_ih, problem, scratch) if inputs else own.w_ih for own in layer.weights]
    w_hh = [gates_widened(own.w_hh, problem, scratch) if recurrent else own.w_hh for own in layer.weights]
    return [own._replace(w_ih=one, w_hh=other) for own, one, other in zip(layer.weights, w_ih, w_hh, strict=True)]


def _ready(layer: Layer) -> Layer:
    return layer._replace(c0=layer.c0.contiguous(), lengths=on_device(layer.lengths, layer.x.device))


def _starts(both: tuple[Segment, ...]) -> tuple[int, int]:
    return both[0].start, both[-1].start


def _tokens_of(gates: Tensor, tokens: Tokens) -> list[Tensor]:
    return [share[: tokens.time * tokens.batch] for share in gates]


def _inputs(layer: Layer, own: Segment, scratch: Scratch) -> Tensor:
    """Return the inputs of a segment [tokens, I], I rounded up."""
    return as_wide(_lying(layer.x[own.start : own.stop], scratch).flatten(0, 1), scratch)


def _lying(tensor: Tensor, scratch: Scratch) -> Tensor:
    """Return a tensor step by step, row by row; a copy only if it lies otherwise."""
    return tensor if tensor.is_contiguous() else scratch.new_empty(tensor.shape).copy_(tensor)


def _shares(given: Sequence[Tensor], size: int) -> Pair:
    """Return where each direction's columns begin in a segment [steps, B, D*H] of its own."""
    return pair([own[..., direction * size :].data_ptr() for direction, own in enumerate(given)])


def _within(kept: Tensor, both: tuple[Segment, ...], time: int) -> list[Tensor]:
    """Return the gates of a segment among those kept [D, T, B, 4H], of each direction's last steps."""
    first = time - kept.shape[1], 0
    places = [slice(own.start - begin, own.stop - begin) for own, begin in zip(both, first, strict=False)]
    return [share[place].flatten(0, 1) for share, place in zip(kept, places, strict=True)]


def _addresses(shares: list[Tensor]) -> Pair:
    return pair([share.data_ptr() for share in shares])


def _cells_of(cells: Tensor, both: tuple[Segment, ...]) -> Pair:
    return pair([cells[direction, own.start].data_ptr() for direction, own in enumerate(both)])

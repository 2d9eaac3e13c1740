"""One layer in little memory: segment by segment, keeping cell states, and the gates of as many steps as fit.

The forward pass needs gates for a segment at a time, and keeps those of the steps it visits last. The backward pass,
which visits those first, makes the others again in their place, from x and the outputs, in two products a segment.
Gradients of the weights add up over segments. `memory.lean_cut` says where a sequence is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs, OutputGradients, Result
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import history, operands, products
from gatewise.kernels.persistent.activation import activate
from gatewise.kernels.persistent.exactness import exact_products
from gatewise.kernels.persistent.layer import in_order as layer_in_order
from gatewise.kernels.persistent.layer import new_counters, on_device, places_of_biases, plain_nan
from gatewise.kernels.persistent.memory import holds_matrices, lean_cut, lean_forward_pieces, overwrites_gates
from gatewise.kernels.persistent.operands import Operand, states_before
from gatewise.kernels.persistent.padding import (
    as_wide,
    columns_widened,
    fitted,
    gates_narrowed,
    gates_widened,
    is_wide,
)
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
from gatewise.kernels.persistent.segments import Segment, parted, visited_together
from gatewise.kernels.persistent.tokens import Tokens, fill_unwritten, order_of
from gatewise.kernels.stack import Layer, LayerGradients


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
    w_ih = [gates_widened(own.w_ih, size, scratch).t() for own in layer.weights]
    h, c = layer.h0, layer.c0
    pairs = visited_together(pieces, directions)
    for both in pairs:
        stretch, is_last = Tokens(both[0].steps, batch, by_row=False), both is pairs[-1]
        gates = in_place if is_last and in_place is not None else elsewhere
        with scratch.frame(), products.in_precision_of(problem):
            for share, weights, own in zip(gates, w_ih, both, strict=True):
                with scratch.frame():
                    torch.mm(_inputs(layer, own, scratch), weights, out=share[: stretch.time * batch])
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
        call = _Call(
            layer._replace(weights=_fitted(layer, size, holds_matrices(problem), count > 1, scratch)),
            history.initial_hidden_states(layer, scratch),
            result.y,
            into.weights,
            _totals(into, size, directions, scratch if count > 1 else None),
            not exact_products(problem),
        )
        dh, dc = above.h_n, above.c_n
        for index, both in enumerate(reversed(pairs)):
            dh_n, dc_n = dh, dc
            dh, dc = (
                end if both is pairs[0] and end is not None else own
                for end, own in zip(into[1:3], between[index % 2], strict=True)
            )
            with scratch.frame():
                at = _place(call, both, index, len(pairs), scratch)
                if index < len(cut.kept):
                    own_gates = _within(kept[0], both, time)
                    dsums = own_gates if over else _tokens_of(dgates, at.tokens)
                    if not over:
                        fill_unwritten(dgates if directions > 1 else dsums[0])
                else:
                    own_gates, dsums = _tokens_of(gates, at.tokens), _tokens_of(dgates, at.tokens)
                    _make_sums(call, at, own_gates, None if over else dsums, scratch)
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
                    _add_to_inputs(call, at, dsums, into.x, scratch)
                if into.weights:
                    _add_to_weights(call, at, dsums, None if over else own_gates, scratch)
        if problem.bias and into.weights and not places:
            _write_biases(call, products.summed_bias_gradients(biases, launch.cut.together, scratch))


class _Call(NamedTuple):
    """What stays the same from segment to segment.

    Attributes:
        layer: The inputs; matrices that are held are rounded up.
        h0: Initial hidden state, as `history.initial_hidden_states` returns it.
        y: Outputs.
        into: For the gradients of the weights, in the layer's flat order; or nothing.
        totals: For those of each direction's matrices, rounded up; None for memory of a segment's own.
        as_batch: Whether the same product of both directions may be made at once.
    """

    layer: Layer
    h0: Tensor
    y: Tensor
    into: tuple[Tensor | None, ...]
    totals: tuple[Tensor | None, ...]
    as_batch: bool

    def into_of(self, direction: int) -> tuple[Tensor | None, ...]:
        """Return where the gradients of a direction's weights go."""
        each = len(self.into) // len(self.layer.weights)
        return self.into[direction * each : (direction + 1) * each]


class _Place(NamedTuple):
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


def _place(call: _Call, both: tuple[Segment, ...], index: int, count: int, scratch: Scratch) -> _Place:
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
    return _Place(both, tokens, [inputs[0], inputs[-1]], past, index == 0, index == count - 1)


def _make_sums(call: _Call, at: _Place, gates: list[Tensor], room: list[Tensor] | None, scratch: Scratch) -> None:
    """Make the gate sums of a segment again, but for biases; `room` as in `_in_one_part`."""
    size, past = call.h0.shape[2], _in_one_part(call, at, room)
    for direction, (weights, sums) in enumerate(zip(call.layer.weights, gates, strict=True)):
        with scratch.frame():
            torch.mm(at.inputs[direction], gates_widened(weights.w_ih, size, scratch).t(), out=sums)
        with scratch.frame():
            w_hh = gates_widened(weights.w_hh, size, scratch).t()
            for part in past[direction]:
                sums[part.tokens].addmm_(part.states, w_hh)


def _in_one_part(call: _Call, at: _Place, room: list[Tensor] | None) -> list[tuple[history.Part, ...]]:
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


def _add_to_inputs(call: _Call, at: _Place, dgates: list[Tensor], dx: Tensor, scratch: Scratch) -> None:
    """Add what a segment gives to the gradient of x [T, B, I]."""
    time, batch, features = dx.shape
    for direction, (own, weights) in enumerate(zip(at.both, call.layer.weights, strict=True)):
        with scratch.frame():
            w_ih = gates_widened(weights.w_ih, call.h0.shape[2], scratch)
            for part, begun in parted(own, _visited_by_the_other(at.both, direction, time)):
                tokens = slice((part.start - own.start) * batch, (part.stop - own.start) * batch)
                dsums, rows = dgates[direction][tokens], dx[part.start : part.stop].flatten(0, 1)
                if w_ih.shape[1] == features:
                    _add(rows, dsums, w_ih, begun=begun)
                    continue
                with scratch.frame():
                    wide = scratch.new_empty(rows.shape[0], w_ih.shape[1])
                    torch.mm(dsums, w_ih, out=wide)
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


def _add_to_weights(call: _Call, at: _Place, dgates: list[Tensor], room: list[Tensor] | None, scratch: Scratch) -> None:
    """Add what a segment gives to the gradients of the matrices; after the last one, hand them over.

    `room` is as in `_in_one_part`.
    """
    size, past = call.h0.shape[2], _in_one_part(call, at, room)
    everything = slice(0, at.tokens.time * at.tokens.batch)
    directions = range(len(at.both))
    for index, read in enumerate(([(history.Part(everything, own),) for own in at.inputs], past)):
        into = [call.into_of(direction)[index] for direction in directions]
        totals = [call.totals[2 * direction + index] for direction in directions]
        lasting = [total for total in totals if total is not None]
        if len(lasting) == len(totals) and all(len(parts) == 1 for parts in read):
            made = [
                products.Product(own.t(), parts[0].states, total, adds=not at.is_first)
                for own, parts, total in zip(dgates, read, lasting, strict=False)
            ]
            products.multiply(made, size, scratch, as_batch=call.as_batch)
        for direction, own, total in zip(directions, into, totals, strict=True):
            if own is None:
                continue
            with scratch.frame():
                if len(lasting) < len(totals) or any(len(parts) > 1 for parts in read):
                    total = scratch.new_empty(_wide_shape(own, size)) if total is None else total
                    for number, part in enumerate(read[direction]):
                        begun = number > 0 or not at.is_first
                        _add(total, dgates[direction][part.tokens].t(), part.states, begun=begun)
                if at.is_last and total is not None and total is not own:
                    gates_narrowed(total, size, own.shape[1], own)


def _write_biases(call: _Call, sums: Tensor) -> None:
    """Write the gradients of each direction's biases from their sums [D, 4H] over segments, H rounded up."""
    for direction, own in enumerate(sums):
        _, _, *both = (weight for weight in call.into_of(direction) if weight is not None)
        products.write_biases(own, call.h0.shape[2], *both)


def _add(total: Tensor, left: Tensor, right: Tensor, *, begun: bool) -> None:
    """Add a product to what was begun, or begin with it."""
    if begun:
        total.addmm_(left, right)
    else:
        torch.mm(left, right, out=total)


def _fitted(layer: Layer, size: int, inputs: bool, recurrent: bool, scratch: Scratch) -> list[DirectionWeights]:
    w_ih = [gates_widened(own.w_ih, size, scratch) if inputs else own.w_ih for own in layer.weights]
    w_hh = [gates_widened(own.w_hh, size, scratch) if recurrent else own.w_hh for own in layer.weights]
    return [own._replace(w_ih=one, w_hh=other) for own, one, other in zip(layer.weights, w_ih, w_hh, strict=True)]


def _totals(into: LayerGradients, size: int, directions: int, scratch: Scratch | None) -> tuple[Tensor | None, ...]:
    """Return where the gradients of the matrices add up; without `scratch` only those that lie as they are returned."""
    each = len(into.weights) // directions
    matrices = [own for index, own in enumerate(into.weights) if index % each < 2] if each else []
    totals = []
    for own in matrices:
        lies_as_returned = own is None or own.shape == _wide_shape(own, size)
        wide = None if lies_as_returned or scratch is None else scratch.new_empty(_wide_shape(own, size))
        totals.append(own if lies_as_returned else wide)
    return tuple(totals)


def _wide_shape(matrix: Tensor, size: int) -> tuple[int, int]:
    return 4 * hidden_of(size), hidden_of(matrix.shape[1])


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

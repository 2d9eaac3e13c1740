"""The schedule of a layer with gradient checkpointing: segment by segment, keeping the cell states of all steps.

The forward pass needs memory for the gates of one segment at a time, and keeps the gates of the steps that it visits
last. The backward pass visits those first. It recomputes the gates of the other segments in the memory of the kept
ones, from x and the outputs, by two matrix products a segment; the gradients of the weights add up over segments.
`memory.lean_cut` says where a sequence is cut into segments.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import OutputGradients, Result
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.launches import LayerWeights, Pair, Tokens
from gatewise.kernels.persistent.schedules import matrix_products, recomputation
from gatewise.kernels.persistent.schedules.recomputation import SegmentedLayer
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.segments import Segment, visited_together
from gatewise.kernels.stack import Layer, LayerGradients
from gatewise.kernels.sums import of_input, recurrent_runs


class Checkpointed:
    """The schedule of one layer with gradient checkpointing; its methods are documented in `Schedule`.

    The tensors that it writes are in the order of steps; x, and the gradient of y, may be in the order of rows.
    """

    def new_kept(self, problem: Problem, features: int, like: Tensor | Scratch, tokens: Tokens) -> tuple[Tensor, ...]:
        """Return memory for the cell states [D, T, B, H], H padded, and for the gates of the steps visited last."""
        steps = memory.lean_cut(problem).kept_steps
        directions, hidden = problem.num_directions, hidden_of(problem.hidden_size)
        cells = tokens.new(like, directions, width=hidden)
        return (cells, tokens._replace(time=steps).new(like, directions, width=4 * hidden)) if steps else (cells,)

    def gradients_in_order(self, above: OutputGradients, tokens: Tokens) -> OutputGradients:
        """Return the gradients of outputs with those of y in the order of steps or rows, copied if in neither."""
        y, h_n, c_n = buffers.gradients_in_order(above._replace(y=None), tokens)
        dy = above.y
        if dy is not None:
            y = dy if dy.transpose(0, 1).is_contiguous() else dy.contiguous()
        return OutputGradients(y, h_n, c_n)

    def forward(
        self,
        problem: Problem,
        layers: Layer,
        tokens: Tokens,
        into: Sequence[Result],
        mask: Tensor | None,
        scratch: Scratch,
    ) -> None:
        """Compute the outputs, from the first segment to the last."""
        (result,), layer = into, layers
        (cells, *kept), y, directions = result.kept, result.y, len(layer.weights)
        size, hidden = problem.hidden_size, hidden_of(problem.hidden_size)
        time, batch, _ = tokens
        pieces = memory.lean_forward_pieces(problem)
        launch = launches.forward_launch(problem, batch, directions, layer.lengths is not None, scratch.device)
        whole = size == hidden  # for the sake of memory, outputs that need no padding are exchanged as they are
        width = size if whole else buffers.exchanged_width(time, launch.tiling)
        polled = not launch.tiling.distributed
        if whole and polled:
            launches.fill_unwritten(y)
        in_place = kept[0].flatten(1, 2) if kept and len(pieces) > 1 else None
        room = max(pieces if in_place is None else pieces[:-1])
        elsewhere = scratch.new_empty(directions, room * batch, 4 * hidden)
        wide = None if whole else scratch.new_empty(max(pieces), batch, directions * width)
        weights = LayerWeights(layer.weights)
        order = launches.longest_first(launch, layer.lengths, scratch)
        w_ih = [buffers.pad_gates(own.w_ih, problem, scratch).t() for own in layer.weights]
        h, c = layer.h0, layer.c0
        pairs = visited_together(pieces, directions)
        for both in pairs:
            steps, is_last = Tokens(both[0].steps, batch, by_row=False), both is pairs[-1]
            gates = in_place if is_last and in_place is not None else elsewhere
            with scratch.frame(), matrix_products.in_precision_of(problem, layer.x):
                for share, matrix, own in zip(gates, w_ih, both, strict=True):
                    with scratch.frame():
                        sums = of_input(share[: steps.time * batch], matrix.shape[1])
                        zeros = matrix_products.memory_for_zeros(problem, scratch)
                        deep_products.mm(_inputs(layer, own, scratch), matrix, sums, memory=zeros)
            outputs = _addresses_of_columns([y[own.start : own.stop] for own in both], size)
            if wide is not None and polled:
                launches.fill_unwritten(wide)
            h0, c0 = buffers.with_plain_nan(buffers.pad_columns(h.flatten(0, 1), scratch), scratch), c
            h, c = result[1:3] if is_last else [scratch.new_empty(directions, batch, size) for _ in range(2)]
            launches.forward_pass(
                launch,
                weights,
                steps,
                gates=launches.planes(gates),
                y=outputs if wide is None else launches.columns(wide, directions),
                y_width=directions * width,
                unpadded=(None, None) if wide is None else outputs,
                cells=_addresses_of_cells(cells, both),
                h0=h0,
                c0=c0,
                h_n=h,
                c_n=c,
                lengths=layer.lengths,
                order=order,
                starts=_starts(both),
                keep_gates=bool(kept) and is_last,
                resets=layer.resets,
            )
        if kept and in_place is None:
            for direction, share in enumerate(kept[0]):
                first = 0 if direction else time - kept[0].shape[1]
                share.copy_(elsewhere[direction].unflatten(0, (time, batch))[first : first + kept[0].shape[1]])

    def backward(
        self,
        problem: Problem,
        layers: Layer,
        results: Sequence[Result],
        above: OutputGradients,
        into: LayerGradients,
        mask: Tensor | None,
        scratch: Scratch,
    ) -> None:
        """Compute the gradients, from the last segment to the first."""
        (result,), layer = results, layers
        (cells, *kept), (time, batch, _), directions = result.kept, layer.x.shape, len(layer.weights)
        size, hidden = problem.hidden_size, hidden_of(problem.hidden_size)
        cut = memory.lean_cut(problem)
        pairs, count = visited_together(cut.pieces, directions), cut.segments
        weights = LayerWeights(layer.weights)
        launch = launches.backward_launch(problem, batch, directions, layer.lengths is not None, scratch.device)
        together = launch.tiling.together
        with scratch.frame(), matrix_products.in_precision_of(problem, layer.x):
            longest = max(cut.rebuilt)
            gates = kept[0].flatten(1, 2) if kept else scratch.new_empty(directions, longest * batch, 4 * hidden)
            over = memory.exchanges_in_gates(problem)
            dgates = gates if over else scratch.new_empty(directions, cut.longest * batch, 4 * hidden)
            bias_sums = buffers.new_bias_sums(together, directions, hidden, scratch, count)
            biases = buffers.bias_gradients_of(problem, into, directions) if together > 1 else []
            done = buffers.new_counters(directions, launch.tiling.blocks if biases else 0, scratch)
            order = launches.longest_first(launch, layer.lengths, scratch)
            between = [[scratch.new_empty(layer.c0.shape) for _ in ("h", "c")] for _ in range(2)]
            padded = _padded(problem, layer, memory.holds_matrices(problem), count > 1, scratch)
            segmented = SegmentedLayer(
                problem,
                layer._replace(weights=padded),
                recomputation.initial_hidden_states(layer, scratch),
                result.y,
                into.weights,
                recomputation.totals_of(into, size, directions, scratch if count > 1 else None),
                not exact_products(problem),
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
                    at = recomputation.visit(segmented, both, index, len(pairs), scratch)
                    if index < len(cut.kept):
                        own_gates = _kept_gates(kept[0], both, time)
                        dsums = own_gates if over else _of_tokens(dgates, at.tokens)
                        if not over and not launch.tiling.distributed:
                            launches.fill_unwritten(dgates if directions > 1 else dsums[0])
                    else:
                        own_gates, dsums = _of_tokens(gates, at.tokens), _of_tokens(dgates, at.tokens)
                        recomputation.recompute_sums(segmented, at, own_gates, None if over else dsums, scratch)
                        filled = None if over or launch.tiling.distributed else dgates
                        launches.activate(problem, weights, gates, filled, at.tokens.time * batch)
                    given = (
                        None if above.y is None else [_in_steps(above.y[own.start : own.stop], scratch) for own in both]
                    )
                    launches.backward_pass(
                        launch,
                        weights,
                        at.tokens,
                        gates=_addresses(own_gates),
                        cells=_addresses_of_cells(cells, both),
                        dy=(None, None) if given is None else _addresses_of_columns(given, size),
                        dgates=_addresses(dsums),
                        c0=recomputation.cell_states(layer, cells, both, scratch),
                        dh_n=dh_n,
                        dc_n=dc_n,
                        dh0=dh,
                        dc0=dc,
                        bias=bias_sums[index],
                        biases=biases if both is pairs[0] else (),
                        done=done,
                        earlier=bias_sums[:index],
                        lengths=layer.lengths,
                        order=order,
                        starts=_starts(both),
                        resets=layer.resets,
                    )
                    if into.x is not None:
                        recomputation.add_to_input_gradient(segmented, at, dsums, into.x, scratch)
                    if into.weights:
                        room = None if over else own_gates
                        recomputation.add_to_weight_gradients(segmented, at, dsums, room, scratch)
            if problem.bias and into.weights and not biases:
                total = matrix_products.total_of_bias_sums(bias_sums, together, scratch)
                recomputation.write_biases(segmented, total)


def _padded(problem: Problem, layer: Layer, inputs: bool, recurrent: bool, scratch: Scratch) -> list[DirectionWeights]:
    """Return the weights with those matrices padded that are to be padded once for all segments."""
    w_ih = [buffers.pad_gates(own.w_ih, problem, scratch) if inputs else own.w_ih for own in layer.weights]
    w_hh = [buffers.pad_gates(own.w_hh, problem, scratch) if recurrent else own.w_hh for own in layer.weights]
    return [own._replace(w_ih=one, w_hh=other) for own, one, other in zip(layer.weights, w_ih, w_hh, strict=True)]


def _starts(both: tuple[Segment, ...]) -> tuple[int, int]:
    return both[0].start, both[-1].start


def _of_tokens(gates: Tensor, tokens: Tokens) -> list[Tensor]:
    return [share[: tokens.time * tokens.batch] for share in gates]


def _inputs(layer: Layer, own: Segment, scratch: Scratch) -> Tensor:
    """Return the inputs of a segment [tokens, I], I padded."""
    steps = _in_steps(layer.x[own.start : own.stop], scratch)
    return buffers.pad_columns_unless_aligned(steps.flatten(0, 1), scratch)


def _in_steps(tensor: Tensor, scratch: Scratch) -> Tensor:
    """Return a tensor in the order of steps, copied only if it is in another."""
    return tensor if tensor.is_contiguous() else scratch.new_empty(tensor.shape).copy_(tensor)


def _addresses_of_columns(given: Sequence[Tensor], size: int) -> Pair:
    """Return the address of each direction's columns in its segment [steps, B, D*H]."""
    return launches.pair([own[..., direction * size :].data_ptr() for direction, own in enumerate(given)])


def _addresses_of_cells(cells: Tensor, both: tuple[Segment, ...]) -> Pair:
    return launches.pair([cells[direction, own.start].data_ptr() for direction, own in enumerate(both)])


def _addresses(shares: list[Tensor]) -> Pair:
    return launches.pair([share.data_ptr() for share in shares])


def _kept_gates(kept: Tensor, both: tuple[Segment, ...], time: int) -> list[Tensor]:
    """Return the gates of a segment from the kept ones [D, T, B, 4H], which are of the last steps of each direction."""
    first = time - kept.shape[1], 0
    places = [slice(own.start - begin, own.stop - begin) for own, begin in zip(both, first, strict=False)]
    return [share[place].flatten(0, 1) for share, place in zip(kept, places, strict=True)]


checkpointed = Checkpointed()

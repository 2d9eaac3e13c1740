"""The schedule of a single layer whose cell is not fused: several states, parameters, or statistics over units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells import step_cell
from gatewise.contract.problem import Problem
from gatewise.contract.saved import OutputGradients, Result
from gatewise.derivation.fused import carried_states
from gatewise.derivation.trace import traced
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.buffers import Entered
from gatewise.kernels.persistent.launches import KeptRows, Launch, RowWeights, Tokens
from gatewise.kernels.persistent.schedules import matrix_products
from gatewise.kernels.persistent.sizes.cell_size import has_two_tensors
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.step import drops_hidden
from gatewise.kernels.stack import Layer, LayerGradients
from gatewise.kernels.sums import recurrent_runs


class RowCell:
    """The schedule of one layer with both directions; its methods are documented in `Schedule`.

    It differs from `SingleLayer` in the values that it keeps (`KeptRows`), because the backward pass computes the step
    again from sums, states and statistics.
    """

    def new_kept(self, problem: Problem, features: int, like: Tensor | Scratch, tokens: Tokens) -> tuple[Tensor, ...]:
        """Return memory for the tensors of `KeptRows`, and of `Entered` before the sums of the second tensor."""
        hidden, directions, cell = hidden_of(problem.hidden_size), problem.num_directions, step_cell(problem.cell)
        widths = len(carried_states(cell)) * hidden, len(traced(cell).statistics)
        sums = [tokens.new(like, directions, width=4 * hidden) for _ in range(1 + has_two_tensors(cell))]
        numbers = [tokens.new(like, directions, width=width, dtype=torch.float32) for width in widths]
        return sums[0], *numbers, *buffers.new_entered(problem, like, tokens), *sums[1:]

    def gradients_in_order(self, above: OutputGradients, tokens: Tokens) -> OutputGradients:
        """Return the gradients of outputs in the order of the kept sums."""
        return buffers.gradients_in_order(above, tokens)

    def forward(
        self,
        problem: Problem,
        layers: Layer,
        tokens: Tokens,
        into: Sequence[Result],
        mask: Tensor | None,
        scratch: Scratch,
    ) -> None:
        """Compute the outputs."""
        (result,), layer = into, layers
        directions = len(layer.weights)
        hidden = hidden_of(problem.hidden_size)
        kept, entered = _kept(problem, result.kept) if result.kept else (None, None)
        gates = tokens.new(scratch, directions, width=4 * hidden) if kept is None else kept.gates
        flat = buffers.pad_columns(tokens.flat(layer.x), scratch)
        with matrix_products.in_precision_of(problem, layer.x):
            sums = [tokens.flat(own) for own in gates]
            matrix_products.input_sums(problem, flat, layer.weights, sums, scratch)
        masks = buffers.masks_of(problem, layer)
        launch = launches.forward_launch(problem, tokens.batch, directions, layer.lengths is not None, scratch.device)
        exchange = buffers.exchange_of(problem, layer, result.y, masks, entered, tokens, scratch, launch)
        if tokens.time > 1:  # or else nothing is exchanged
            launches.fill_unwritten(exchange.states)
        launches.row_forward_pass(
            launch,
            RowWeights(layer.weights, scratch),
            tokens,
            gates=gates,
            y=exchange.states,
            unpadded=exchange.unpadded,
            kept=kept,
            h0=exchange.h0,
            c0=layer.c0,
            h_n=result.h_n,
            c_n=result.c_n,
            lengths=layer.lengths,
            order=launches.longest_first(launch, layer.lengths, scratch),
            resets=layer.resets,
            masks=masks,
            ring=_ring(launch, directions, scratch),
        )

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
        """Compute the gradients: one launch for those of the sums, then matrix products over all steps."""
        (result,), layer, directions = results, layers, len(layers.weights)
        (kept, entered), hidden, cell = _kept(problem, result.kept), hidden_of(problem.hidden_size), problem.cell
        tokens = buffers.order_of_kept(kept.gates)
        launch = launches.backward_launch(problem, tokens.batch, directions, layer.lengths is not None, scratch.device)
        with scratch.frame(), matrix_products.in_precision_of(problem, layer.x):
            dgates = launches.fill_unwritten(tokens.new(scratch, directions, width=4 * hidden))
            dinput = tokens.new(scratch, directions, width=4 * hidden) if has_two_tensors(cell) else None
            rows = len(cell.parameters) + len(cell.sums)
            dvalues = scratch.new_empty(launch.tiling.together, directions, rows, hidden, dtype=torch.float32)
            states = (into.h0, layer.h0), (into.c0, layer.c0)
            dh0, dc0 = (scratch.new_empty(*own.shape) if found is None else found for found, own in states)
            launches.row_backward_pass(
                launch,
                RowWeights(layer.weights, scratch),
                tokens,
                kept=kept,
                dy=above.y,
                dgates=dgates,
                dinput=dinput,
                dvalues=dvalues,
                c0=layer.c0,
                dh_n=above.h_n,
                dc_n=above.c_n,
                dh0=dh0,
                dc0=dc0,
                lengths=layer.lengths,
                order=launches.longest_first(launch, layer.lengths, scratch),
                resets=layer.resets,
                masks=buffers.masks_of(problem, layer),
                ring=_ring(launch, directions, scratch),
            )
            of_input = dgates if dinput is None else dinput
            if into.x is not None:
                dsums = [tokens.flat(sums) for sums in of_input]
                matrix_products.input_gradient(problem, dsums, layer.weights, tokens.flat(into.x), scratch)
            weights = [weight for weight in into.weights if weight is not None]
            if weights:
                y, layer = buffers.with_entered(result.y, layer, entered)
                _weight_gradients(problem, layer, y, dgates, dinput, dvalues, tokens, weights, scratch)


def _kept(problem: Problem, tensors: Sequence[Tensor]) -> tuple[KeptRows, Entered | None]:
    gates, cells, statistics, *others = tensors
    entered = Entered(*others[:2]) if drops_hidden(problem.cell) else None
    recurrent = others[2:] if entered else others
    return KeptRows(gates, cells, statistics, recurrent[0] if recurrent else None), entered


def _ring(launch: Launch, directions: int, scratch: Scratch) -> Tensor | None:
    """Return memory for the exchange of statistics in a launch, or None without statistics."""
    words = directions * launch.tiling.together * launch.tiling.ring_words
    return launches.fill_unwritten(scratch.new_empty(words, dtype=torch.int32)) if words else None


def _weight_gradients(
    problem: Problem,
    layer: Layer,
    y: Tensor,
    dgates: Tensor,
    dinput: Tensor | None,
    dvalues: Tensor,
    tokens: Tokens,
    into: Sequence[Tensor],
    scratch: Scratch,
) -> None:
    """Compute the gradients of matrices, biases and parameters."""
    each, cell, size = len(into) // len(layer.weights), problem.cell, problem.hidden_size
    gates, count = len(cell.gates), len(cell.parameters)
    matrices = [weight for first in range(0, len(into), each) for weight in into[first : first + 2]]
    matrix_products.weight_gradients(
        problem, layer, y, dgates, None, layer.lengths, tokens, matrices, scratch, dinput=dinput
    )
    for direction in range(len(layer.weights)):
        own, parts = into[direction * each : (direction + 1) * each], dvalues[:, direction, :, :size]
        with scratch.frame():
            total = torch.sum(parts, 0, out=scratch.new_empty(parts.shape[1:], dtype=torch.float32))
            if count:
                _copy_rows(total[:count], own[-count:])
            if problem.bias:
                sums, (b_ih, b_hh) = total[count:], own[2:4]
                b_ih.view(gates, size).copy_(sums[:gates])
                for run in recurrent_runs(cell):
                    b_hh.view(gates, size)[run.gates : run.gates + run.number] = sums[run.sums : run.sums + run.number]


def _copy_rows(matrix: Tensor, into: Sequence[Tensor]) -> None:
    """Copy each row of a matrix to a vector, all at once where the vectors follow one another in one buffer."""
    first, size = into[0], matrix.shape[1]
    places = [own.storage_offset() - first.storage_offset() for own in into]
    buffers = {own.untyped_storage().data_ptr() for own in into}  # buffers of their own can be neighbours, too
    if len(buffers) == 1 and places == [row * size for row in range(len(into))]:
        first.as_strided(matrix.shape, (size, 1)).copy_(matrix)
        return
    for row, own in zip(matrix, into, strict=True):
        own.copy_(row)


row_cell = RowCell()

"""The schedule of a single layer: one launch for the whole sequence, with matrix products over all steps around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import OutputGradients, Result
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.buffers import Entered
from gatewise.kernels.persistent.launches import LayerWeights, Tokens
from gatewise.kernels.persistent.schedules import layer_gradients, matrix_products
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.persistent.sizes.step import drops_hidden
from gatewise.kernels.stack import Layer, LayerGradients


class KeptSteps(NamedTuple):
    """The values of all steps that a forward pass keeps for the backward pass, H padded.

    Attributes:
        gates: The activated gates [D, T, B, 4H].
        cells: The cell states [D, T, B, H].
        entered: The hidden states with recurrent dropout; None without it.
        matrices: The padded input weights [G * H, I] of each direction where they are kept, too.
    """

    gates: Tensor
    cells: Tensor
    entered: Entered | None
    matrices: tuple[Tensor, ...]

    @classmethod
    def of(cls, problem: Problem, kept: Sequence[Tensor]) -> KeptSteps:
        """Return the tensors that `SingleLayer.new_kept` returned."""
        gates, cells, *others = kept
        if not drops_hidden(problem.cell):
            return cls(gates, cells, None, tuple(others))
        states, first, *matrices = others
        return cls(gates, cells, Entered(states, first), tuple(matrices))


class GateGradients(NamedTuple):
    """The results of the launch of a backward pass, H padded where not said otherwise.

    Attributes:
        sums: The gradients of the gate sums [D, T, B, 4H].
        bias: The gradients of the gate sums, added up over all tokens [D, 4H], of which those of the biases are
            made; None where the launch wrote the latter to their memory.
        h0: The gradient of the initial hidden state [D, B, H], not padded.
        c0: The gradient of the initial cell state [D, B, H], not padded.
        tokens: The order of `sums`.
    """

    sums: Tensor
    bias: Tensor | None
    h0: Tensor
    c0: Tensor
    tokens: Tokens


class SingleLayer:
    """The schedule of one layer with both directions; its methods are documented in `Schedule`."""

    def new_kept(self, problem: Problem, features: int, like: Tensor | Scratch, tokens: Tokens) -> tuple[Tensor, ...]:
        """Return memory for the tensors of `KeptSteps`."""
        hidden, directions = hidden_of(problem.hidden_size), problem.num_directions
        kept = tokens.new(like, directions, width=4 * hidden), tokens.new(like, directions, width=hidden)
        kept += buffers.new_entered(problem, like, tokens)
        if not memory.keeps_matrices(problem):
            return kept
        rows, columns = len(problem.cell.gates) * hidden, hidden_of(features)
        return *kept, *[like.new_empty(rows, columns) for _ in range(directions)]

    def gradients_in_order(self, above: OutputGradients, tokens: Tokens) -> OutputGradients:
        """Return the gradients of outputs in the order of the kept gates."""
        return buffers.gradients_in_order(above, tokens)

    def forward(
        self,
        problem: Problem,
        layers: Layer,
        tokens: Tokens,
        into: Sequence[Result],
        mask: Tensor | None,
        scratch: Scratch,
        *,
        first: list[Tensor] | None = None,
    ) -> None:
        """Compute the outputs; `first` is added to the gate sums of each direction's first step [B, 4H], H padded."""
        (result,), layer = into, layers
        directions = len(layer.weights)
        hidden = hidden_of(problem.hidden_size)
        kept = KeptSteps.of(problem, result.kept) if result.kept else None
        gates = tokens.new(scratch, directions, width=4 * hidden) if kept is None else kept.gates
        cells, entered, matrices = kept[1:] if kept else (None, None, ())
        flat = buffers.pad_columns(tokens.flat(layer.x), scratch)
        with matrix_products.in_precision_of(problem, layer.x):
            sums = [tokens.flat(own) for own in gates]
            matrix_products.input_sums(problem, flat, layer.weights, sums, scratch, matrices)
        if first is not None:
            matrix_products.add_to_first_steps(gates, first, layer.lengths)
        masks = buffers.masks_of(problem, layer)
        launch = launches.forward_launch(problem, tokens.batch, directions, layer.lengths is not None, scratch.device)
        exchange = buffers.exchange_of(problem, layer, result.y, masks, entered, tokens, scratch, launch)
        if tokens.time > 1 and not launch.tiling.distributed:  # or else nothing is exchanged there
            launches.fill_unwritten(exchange.states)
        launches.forward_pass(
            launch,
            LayerWeights(layer.weights),
            tokens,
            gates=launches.planes(gates),
            y=exchange.places,
            y_width=exchange.width,
            unpadded=launches.columns(exchange.unpadded, directions),
            cells=launches.planes(cells),
            h0=exchange.h0,
            c0=layer.c0,
            h_n=result.h_n,
            c_n=result.c_n,
            lengths=layer.lengths,
            order=launches.longest_first(launch, layer.lengths, scratch),
            keep_gates=cells is not None,
            resets=layer.resets,
            masks=masks,
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
        """Compute the gradients: one launch for those of the gate sums, then matrix products over all steps."""
        (result,), layer = results, layers
        kept = KeptSteps.of(problem, result.kept)
        weights = [weight for weight in into.weights if weight is not None]
        with scratch.frame(), matrix_products.in_precision_of(problem, layer.x):
            found = gate_gradients(problem, layer, result.kept, above, scratch, into)
            y, layer = buffers.with_entered(result.y, layer, kept.entered)
            of_sums = found.sums, found.bias, layer.lengths, found.tokens
            layer_gradients.write(problem, layer, y, *of_sums, into.x, weights, scratch, kept.matrices)


def gate_gradients(
    problem: Problem,
    layer: Layer,
    kept: tuple[Tensor, ...],
    above: OutputGradients,
    scratch: Scratch,
    into: LayerGradients | None = None,
) -> GateGradients:
    """Compute the gradients of the gate sums and of the initial states in one launch.

    Args:
        problem: The problem.
        layer: The inputs of the layer.
        kept: The kept gates and cell states; the gradients of the gate sums may overwrite the gates.
        above: The gradients of the outputs.
        scratch: The memory for everything that `into` has no memory for.
        into: The memory for the gradients of the states and the biases, or None.
    """
    (gates, cells), directions = kept[:2], len(layer.weights)
    hidden, tokens = hidden_of(problem.hidden_size), buffers.order_of_kept(gates)
    launch = launches.backward_launch(problem, tokens.batch, directions, layer.lengths is not None, scratch.device)
    together = launch.tiling.together
    biases = [] if into is None else buffers.bias_gradients_of(problem, into, directions)
    counters = launch.tiling.blocks if biases and together > 1 else 0
    dgates, exchange, done = gates, None, None
    if launch.interleaved or not (memory.exchanges_in_gates(problem) or launch.tiling.distributed):
        of_counters = (directions * counters * torch.int32.itemsize,) if counters else ()
        exchange, room = buffers.exchanged_gradients(launch, directions, tokens, scratch, layer.x, *of_counters)
        done = room.new_empty(directions, counters, dtype=torch.int32) if counters else None
        dgates = gates if launch.interleaved else exchange
    else:
        if launch.tiling.distributed:
            dgates = tokens.new(scratch, directions, width=4 * hidden)
        done = buffers.new_counters(directions, counters, scratch)
    dh0, dc0 = (
        found if found is not None else scratch.new_empty(directions, tokens.batch, problem.hidden_size)
        for found in ((None, None) if into is None else into[1:3])
    )
    in_place = biases and together == 1
    bias = None if in_place else buffers.new_bias_sums(together, directions, hidden, scratch, 1)[0]
    launches.backward_pass(
        launch,
        LayerWeights(layer.weights),
        tokens,
        gates=launches.planes(gates),
        cells=launches.planes(cells),
        dy=launches.columns(above.y, directions),
        dgates=launches.planes(dgates),
        exchange=launches.planes(exchange if launch.interleaved else None),
        c0=layer.c0,
        dh_n=above.h_n,
        dc_n=above.c_n,
        dh0=dh0,
        dc0=dc0,
        bias=bias,
        biases=biases,
        done=done,
        lengths=layer.lengths,
        order=launches.longest_first(launch, layer.lengths, scratch),
        resets=layer.resets,
        masks=buffers.masks_of(problem, layer),
    )
    if bias is None or biases:
        total = None
    elif together > 1:
        total = torch.sum(bias, 0, out=scratch.new_empty(directions, 4 * hidden, dtype=torch.float32))
    else:
        total = bias[0]
    return GateGradients(dgates, total, dh0, dc0, tokens)


single_layer = SingleLayer()

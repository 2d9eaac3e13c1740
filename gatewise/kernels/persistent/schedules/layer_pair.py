"""The schedule of a pair of layers: both in one launch, the second one a time step behind the first.

Some of the thread blocks compute neither layer but what lies between them: they multiply the outputs of each step with
the input weights of the second layer as soon as they arrive, and in the backward pass the gradients of its gate sums.
So one launch replaces two, and one of the matrix products over all steps. `sizes.layer_pairs` says where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import OutputGradients, Result
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.launches import BetweenLayers, LayerWeights, Pair, Tokens
from gatewise.kernels.persistent.schedules import layer_gradients, matrix_products
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.stack import Layer, LayerGradients, survivors_scale


class LayerPair:
    """The schedule of two layers with one direction; its methods are documented in `Schedule`."""

    def forward(
        self,
        problem: Problem,
        layers: Layer,
        tokens: Tokens,
        into: Sequence[Result],
        mask: Tensor | None,
        scratch: Scratch,
    ) -> None:
        """Compute the outputs of both layers."""
        size, hidden = problem.hidden_size, hidden_of(problem.hidden_size)
        kept = [own.kept or (tokens.new(scratch, 1, width=4 * hidden), None) for own in into]
        gates, cells, matrices = zip(*[(own[0][0], own[1], own[2:]) for own in kept], strict=True)
        launches.fill_unwritten(gates[1])  # before the product, whose result should be in the second-level cache
        flat = buffers.pad_columns(tokens.flat(layers.x), scratch)
        with matrix_products.in_precision_of(problem, layers.x):
            first = tokens.flat(gates[0])
            matrix_products.input_sums(problem, flat, layers.weights[:1], [first], scratch, matrices[0][:1])
        if matrices[1]:
            buffers.pad_gates(layers.weights[1].w_ih, problem, scratch, matrices[1][0])
        outputs: list[Tensor] = [own.y for own in into]
        launch = launches.pair_launch("forward", problem, tokens.batch, layers.lengths is not None, scratch.device)
        width = buffers.exchanged_width(tokens.time, launch.tiling)
        apart = launch.interleaved or size != width
        wide = [buffers.new_exchange(launch, 1, tokens, scratch) for _ in into] if apart else outputs
        dropped = [] if mask is None else [buffers.new_exchange(launch, 1, tokens, scratch)]
        for buffer in (*wide, *dropped):
            launches.fill_unwritten(buffer)
        passed = dropped[0] if dropped else None
        launches.forward_pass(
            launch,
            LayerWeights(layers.weights),
            tokens,
            gates=_addresses(gates),
            y=_addresses(wide),
            y_width=width,
            unpadded=_addresses(outputs) if apart else (None, None),
            cells=_addresses(cells),
            h0=buffers.initial_states(launch, layers.h0, scratch),
            c0=layers.c0,
            h_n=into[0].h_n,
            c_n=into[0].c_n,
            lengths=layers.lengths,
            keep_gates=cells[0] is not None,
            between=BetweenLayers(layers.weights[1].w_ih, passed, mask, survivors_scale(problem)),
            resets=layers.resets,
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
        """Compute the gradients of both layers."""
        hidden, batch = hidden_of(problem.hidden_size), layers.x.shape[1]
        gates, cells = zip(*[own.kept[:2] for own in results], strict=True)
        tokens = buffers.order_of_kept(gates[0])
        weights = [weight for weight in into.weights if weight is not None]
        each = len(weights) // 2
        biases = buffers.bias_gradients_of(problem, into, 2)
        launch = launches.pair_launch("backward", problem, batch, layers.lengths is not None, scratch.device)
        together = launch.tiling.together
        with scratch.frame(), matrix_products.in_precision_of(problem, layers.x):
            apart, marked = launch.interleaved, memory.exchanges_in_gates(problem)
            counters, between = (2, launch.tiling.blocks), tokens.time * batch * hidden * problem.element_bytes
            sizes = between, math.prod(counters) * torch.int32.itemsize
            exchange, room = buffers.exchanged_gradients(launch, 0 if marked else 2, tokens, scratch, layers.x, *sizes)
            dy_between, done = tokens.new(room, width=hidden), room.new_empty(counters, dtype=torch.int32)
            dgates = gates if apart or marked else exchange.split(1)
            in_place = biases and together == 1
            bias = None if in_place else buffers.new_bias_sums(together, 2, hidden, scratch, 1)[0]
            dh0, dc0 = (scratch.new_empty(layers.c0.shape) if own is None else own for own in (into.h0, into.c0))
            launches.backward_pass(
                launch,
                LayerWeights(layers.weights),
                tokens,
                gates=_addresses(gates),
                cells=_addresses(cells),
                dy=(None, None if above.y is None else above.y.data_ptr()),
                dgates=_addresses(dgates),
                exchange=launches.planes(exchange) if apart else (None, None),
                c0=layers.c0,
                dh_n=above.h_n,
                dc_n=above.c_n,
                dh0=dh0,
                dc0=dc0,
                bias=bias,
                biases=biases,
                done=done,
                lengths=layers.lengths,
                between=BetweenLayers(layers.weights[1].w_ih, dy_between, mask, survivors_scale(problem)),
                resets=layers.resets,
            )
            for index in range(2 if weights else 1):
                own = slice(index, index + 1)
                below = layers.x if index == 0 else _survivors(problem, results[0].y, mask, tokens, scratch)
                layer_gradients.write(
                    problem,
                    layers._replace(
                        x=below,
                        h0=layers.h0[own],
                        weights=layers.weights[own],
                        ends_in_zeros=layers.ends_in_zeros or index > 0,
                    ),
                    results[index].y,
                    dgates[index],
                    None,  # the launch wrote the gradients of the biases
                    layers.lengths,
                    tokens,
                    None if index else into.x,
                    weights[index * each : (index + 1) * each],
                    scratch,
                    results[0].kept[2:],
                )


def _survivors(problem: Problem, y: Tensor, mask: Tensor | None, tokens: Tokens, scratch: Scratch) -> Tensor:
    if mask is None:
        return y
    return torch.mul(y, mask, out=tokens.new(scratch, width=y.shape[2])).mul_(survivors_scale(problem))


def _addresses(tensors: Iterable[Tensor | None]) -> Pair:
    return launches.pair([launches.address(tensor) for tensor in tensors])


layer_pair = LayerPair()

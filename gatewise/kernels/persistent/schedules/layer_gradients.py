"""The gradients of x and of a layer's weights from those of its gate sums, by the faster kind of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gatewise.contract import token_factors
from gatewise.contract.problem import Problem
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent.launches import Tokens
from gatewise.kernels.persistent.schedules import half_products, matrix_products
from gatewise.kernels.persistent.sizes import half_operands
from gatewise.kernels.stack import Layer


def write(
    problem: Problem,
    layer: Layer,
    y: Tensor,
    dgates: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    tokens: Tokens,
    dx: Tensor | None,
    into: Sequence[Tensor],
    scratch: Scratch,
    kept: Sequence[Tensor] = (),
) -> None:
    """Write the gradients of x and of a layer's weights, except projections.

    Args:
        problem: The problem.
        layer: The inputs of the layer, as in `matrix_products.weight_gradients`.
        y: The hidden states, as there.
        dgates: The gradients of the gate sums [D, T, B, 4H], which may be overwritten.
        bias: The gradients of the gate sums, added up over all tokens [D, 4H], of which those of the biases are
            made; None if the latter are written already.
        lengths: The sequence lengths [B] on the device, or None.
        tokens: The order of `dgates`.
        dx: The memory for the gradient of x [T, B, I] in the order of `tokens`, or None.
        into: The memory for the gradients of the weights, from `buffers.new_weight_gradients`, or nothing.
        scratch: The memory for everything else.
        kept: The padded input weights of each direction where they were kept, or nothing.
    """
    flat = None if dx is None else tokens.flat(dx)
    directions = len(layer.weights)
    if half_operands.uses_halves(problem, layer.x.shape[2], scratch.device, x=flat is not None, weights=bool(into)):
        each = len(into) // directions
        own = [into[first : first + each] for first in range(0, len(into), each)] if into else []
        matrices = [(w_ih, w_hh) for w_ih, w_hh, *_ in own]
        half_products.gradients(problem, layer, y, dgates, lengths, tokens, flat, matrices, scratch)
        for direction, (_, _, *both) in enumerate(own):
            if bias is not None and both:
                matrix_products.write_biases(problem, bias[direction], *both)
        return

    def write_weights() -> None:
        if into:
            matrix_products.weight_gradients(problem, layer, y, dgates, bias, lengths, tokens, into, scratch)

    def write_input() -> None:
        if flat is not None:
            dsums = [tokens.flat(sums) for sums in dgates]
            matrix_products.input_gradient(problem, dsums, layer.weights, flat, scratch, kept)

    # Gradients that processes exchange come first, so that they are sent while that of x is computed. Factors come
    # last: they are sent in less time than the layer below takes, beside which the product for x would take longer.
    steps = (write_weights, write_input) if token_factors.receiver.get() is None else (write_input, write_weights)
    for step in steps:
        step()

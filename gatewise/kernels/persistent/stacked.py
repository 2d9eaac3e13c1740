"""Two stacked layers beside each other in one launch, the second a step behind the first.

A third row of blocks between them multiplies each step's outputs with the input weights of the second layer as soon as
they come, and on the way back each step's gradients of its gate sums. So there is one launch, and no product over all
steps, for what would be two of the one and one of the other. `wavefront` says where it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.contract.saved import OutputGradients, Result
from gatewise.kernels.cuda.scratch import Scratch, bytes_together
from gatewise.kernels.persistent import products
from gatewise.kernels.persistent.layer import plain_nan
from gatewise.kernels.persistent.memory import overwrites_gates
from gatewise.kernels.persistent.padding import columns_widened, gates_widened
from gatewise.kernels.persistent.passes import (
    Between,
    Matrices,
    Pair,
    address,
    backward_pass,
    forward_pass,
    pair,
    stacked_launch,
)
from gatewise.kernels.persistent.plan import hidden_of
from gatewise.kernels.persistent.tokens import Tokens, fill_unwritten, order_of_kept
from gatewise.kernels.stack import Layer, LayerGradients, survivors_scale


def compute(
    problem: Problem, layers: Layer, tokens: Tokens, into: Sequence[Result], mask: Tensor | None, scratch: Scratch
) -> None:
    """Compute two layers into memory that is there.

    Args:
        problem: What is asked.
        layers: Inputs of the first, as `layer.compute` takes them; states and weights of both.
        tokens: The order of x, and of the tensors of `into`.
        into: Outputs of each; the states of the first are those of both.
        mask: What survives between them [T, B, H]; None without dropout.
        scratch: For all else.
    """
    size, hidden = problem.hidden_size, hidden_of(problem.hidden_size)
    kept = [own.kept or (tokens.new(scratch, 1, width=4 * hidden), None) for own in into]
    gates, cells, matrices = zip(*[(own[0][0], own[1], own[2:]) for own in kept], strict=True)
    fill_unwritten(gates[1])  # before the product, which the second-level cache is to hold
    flat = columns_widened(tokens.flat(layers.x), scratch)
    with products.in_precision_of(problem):
        keep = matrices[0][0] if matrices[0] else None
        products.input_sums(problem, flat, layers.weights[0], tokens.flat(gates[0]), scratch, keep)
    if matrices[1]:
        gates_widened(layers.weights[1].w_ih, problem, scratch, matrices[1][0])
    outputs: list[Tensor] = [own.y for own in into]
    wide = outputs if size == hidden else [tokens.new(scratch, width=hidden) for _ in into]
    dropped = [] if mask is None else [tokens.new(scratch, width=hidden)]
    for buffer in (*wide, *dropped):
        fill_unwritten(buffer)
    forward_pass(
        stacked_launch("forward", problem, tokens.batch, layers.lengths is not None, layers.x.device),
        Matrices(layers.weights),
        tokens,
        gates=_starts(gates),
        y=_starts(wide),
        narrow=(None, None) if size == hidden else _starts(outputs),
        cells=_starts(cells),
        h0=plain_nan(columns_widened(layers.h0.flatten(0, 1), scratch), scratch),
        c0=layers.c0,
        h_n=into[0].h_n,
        c_n=into[0].c_n,
        lengths=layers.lengths,
        keep_gates=cells[0] is not None,
        between=Between(layers.weights[1].w_ih, dropped[0] if dropped else None, mask, survivors_scale(problem)),
    )


def differentiate(
    problem: Problem,
    layers: Layer,
    results: Sequence[Result],
    above: OutputGradients,
    into: LayerGradients,
    mask: Tensor | None,
    scratch: Scratch,
) -> None:
    """Compute the gradients of two layers into memory that is there.

    Args:
        problem: What is asked.
        layers: Their inputs, as `compute` takes them.
        results: Outputs of each.
        above: Gradients of the outputs of the second, and of the states of both.
        into: Gradients; x is None and weights are empty if they are not wanted.
        mask: As in `compute`.
        scratch: For all else.
    """
    hidden, batch = hidden_of(problem.hidden_size), layers.x.shape[1]
    gates, cells = zip(*[own.kept[:2] for own in results], strict=True)
    tokens = order_of_kept(gates[0])
    weights = [weight for weight in into.weights if weight is not None]
    each = len(weights) // 2
    places = [(weights[first + 2], weights[first + 3]) for first in (0, each)] if problem.bias and weights else []
    launch = stacked_launch("backward", problem, batch, layers.lengths is not None, layers.x.device)
    together = launch.cut.together
    with scratch.frame(), products.in_precision_of(problem):
        over = overwrites_gates(problem)
        new, dy_between, done = _unwritten(tokens, 0 if over else 2, hidden, launch.cut.blocks, scratch, layers.x)
        dgates = gates if over else [new[:1], new[1:]]
        in_place = places and together == 1
        bias = None if in_place else products.new_bias_gradients(together, 2, hidden, scratch, 1)[0]
        dh0, dc0 = (scratch.new_empty(layers.c0.shape) if own is None else own for own in (into.h0, into.c0))
        backward_pass(
            launch,
            Matrices(layers.weights),
            tokens,
            gates=_starts(gates),
            cells=_starts(cells),
            dy=(None, None if above.y is None else above.y.data_ptr()),
            dgates=_starts(dgates),
            c0=layers.c0,
            dh_n=above.h_n,
            dc_n=above.c_n,
            dh0=dh0,
            dc0=dc0,
            bias=bias,
            biases=places,
            done=done,
            lengths=layers.lengths,
            between=Between(layers.weights[1].w_ih, dy_between, mask, survivors_scale(problem)),
        )
        if into.x is not None:
            dsums, kept = [tokens.flat(dgates[0][0])], results[0].kept[2:]
            dx = tokens.flat(into.x)
            products.input_gradient(problem, dsums, layers.weights[:1], dx, scratch, kept)
        if not weights:
            return
        for index, x in enumerate((layers.x, _survivors(problem, results[0].y, mask, tokens, scratch))):
            own = slice(index, index + 1)
            products.weight_gradients(
                problem,
                layers._replace(
                    x=x,
                    h0=layers.h0[own],
                    weights=layers.weights[own],
                    ends_in_zeros=layers.ends_in_zeros or index > 0,
                ),
                results[index].y,
                dgates[index],
                None,  # is where it belongs
                layers.lengths,
                tokens,
                weights[index * each : (index + 1) * each],
                scratch,
            )


def _unwritten(
    tokens: Tokens, layers: int, hidden: int, counters: int, scratch: Scratch, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of so many layers' gate sums, those between two, and counters of blocks, filled together."""
    values = tokens.time * tokens.batch * hidden * like.element_size()
    sizes = layers * 4 * values, values, 2 * counters * torch.int32.itemsize
    memory = fill_unwritten(scratch.new_empty(bytes_together(sizes), dtype=torch.uint8))
    parts = Scratch(like, memory)
    dgates, between = tokens.new(parts, layers, width=4 * hidden), tokens.new(parts, width=hidden)
    return dgates, between, parts.new_empty(2, counters, dtype=torch.int32)


def _survivors(problem: Problem, y: Tensor, mask: Tensor | None, tokens: Tokens, scratch: Scratch) -> Tensor:
    if mask is None:
        return y
    return torch.mul(y, mask, out=tokens.new(scratch, width=y.shape[2])).mul_(survivors_scale(problem))


def _starts(tensors: Iterable[Tensor | None]) -> Pair:
    return pair([address(tensor) for tensor in tensors])

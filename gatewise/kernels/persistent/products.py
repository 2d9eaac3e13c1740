"""The library products around the loop: over all steps at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.long_products import Factors, in_stretches
from gatewise.kernels.cuda.precision import products_in_tf32
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import operands
from gatewise.kernels.persistent.exactness import exact_products
from gatewise.kernels.persistent.memory import copies_states
from gatewise.kernels.persistent.operands import Operand, states_before
from gatewise.kernels.persistent.padding import columns_widened, fitted, gates_narrowed, gates_widened, is_wide
from gatewise.kernels.persistent.plan import hidden_of
from gatewise.kernels.persistent.tokens import Tokens
from gatewise.kernels.stack import Layer
from gatewise.kernels.sums import SUMS, Run, of_input, recurrent_runs

Place = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides, where it begins

_STRETCHES_OF_FULL = 3
_AS_EVER = contextlib.nullcontext()


def in_precision_of(problem: Problem) -> contextlib.AbstractContextManager[None]:
    """Return a context in which float32 products are rounded to TF32 as the kernel's own are, or are not."""
    if problem.dtype != torch.float32:
        return _AS_EVER
    return products_in_tf32(problem.replace(allow_tf32=not exact_products(problem)))


def input_sums(
    problem: Problem, x: Tensor, weights: DirectionWeights, out: Tensor, scratch: Scratch, keep: Tensor | None
) -> None:
    """Write x W_ih^T [tokens, GH] to the first columns of `out`; the columns of x are rounded up.

    Args:
        problem: Gives the sizes.
        x: Input [tokens, I].
        weights: The weights of a direction.
        out: Gate sums [tokens, 4H].
        scratch: For the weights, rounded up.
        keep: Where they are kept instead, or None.
    """
    with scratch.frame():
        matrix = gates_widened(weights.w_ih, problem, scratch, keep)
        deep_products.mm(x, matrix.t(), of_input(out, matrix.shape[0]))


def add_to_first_steps(gates: Tensor, first: list[Tensor], lengths: Tensor | None) -> None:
    """Add [B, 4H] of each direction to the gate sums [D, T, B, 4H] of the step that it begins with."""
    gates[0, 0] += first[0]
    if len(first) == 1:
        return
    if lengths is None:
        gates[1, -1] += first[1]
    else:
        at = last_steps(lengths), torch.arange(gates.shape[2], device=gates.device)
        gates[1][at] += first[1]


def input_gradient(
    problem: Problem,
    dsums: list[Tensor],
    weights: list[DirectionWeights],
    into: Tensor,
    scratch: Scratch,
    kept: Sequence[Tensor] = (),
) -> None:
    """Compute the gradient of x from those of the gate sums [tokens, 4H] of each direction.

    Args:
        problem: Gives the sizes.
        dsums: The gradients of each direction.
        weights: The weights of each direction.
        into: [tokens, I], contiguous.
        scratch: For what is rounded up.
        kept: Weights of each direction that are rounded up already, or nothing.
    """
    rows, features = into.shape
    with scratch.frame():
        wide = features % 8 > 0
        total = scratch.new_empty(rows, hidden_of(features)) if wide else into
        for direction, (share, own) in enumerate(zip(dsums, weights, strict=True)):
            with scratch.frame():
                matrix = kept[direction] if kept else gates_widened(own.w_ih, problem, scratch)
                dsums_of_input = of_input(share, matrix.shape[0])
                if direction == 0:
                    deep_products.mm(dsums_of_input, matrix, total)
                else:
                    deep_products.addmm(total, dsums_of_input, matrix)
        if wide:
            fitted(total, rows, features, into=into)


def new_weight_gradients(layer: Layer, *, apart: bool = False) -> tuple[Tensor, ...]:
    """Return unwritten gradients of a layer's weights, but for projections, in its flat order.

    Args:
        layer: The inputs of the layer.
        apart: Whether each has memory of its own; otherwise all lie side by side in one buffer.
    """
    weights = [tensor for own in layer.weights for tensor in own._replace(w_hr=None).tensors()]
    if apart:
        return tuple([weight.new_empty(weight.shape) for weight in weights])
    return side_by_side(new_buffer(weights), weights)


def new_buffer(weights: Sequence[Tensor]) -> Tensor:
    """Return unwritten memory for as many values as weights have."""
    return weights[0].new_empty(sum([weight.numel() for weight in weights]))


def side_by_side(buffer: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of a buffer, one behind the other, in the shapes of weights."""
    return tuple([buffer.as_strided(*place) for place in places([weight.shape for weight in weights])])


def places(shapes: Sequence[Sequence[int]]) -> tuple[Place, ...]:
    """Return where tensors of these shapes lie, without gaps, one behind the other."""
    found, begin = [], 0
    for shape in shapes:
        found.append((tuple(shape), tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))), begin))
        begin += math.prod(shape)
    return tuple(found)


def weight_shapes(problem: Problem) -> list[tuple[int, ...]]:
    """Return the shapes of all weights in flat order, but for projections."""
    gates, shapes = problem.gate_rows, []
    for layer in range(problem.num_layers):
        own = [(gates, problem.layer_input_size(layer)), (gates, problem.state_size)]
        shapes += (own + [(gates,)] * (2 * problem.bias)) * problem.num_directions
    return shapes


def weight_gradients(
    problem: Problem,
    layer: Layer,
    y: Tensor,
    dgates: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    tokens: Tokens,
    into: Sequence[Tensor],
    scratch: Scratch,
) -> None:
    """Compute the gradients of a layer's weights, but for projections.

    Args:
        problem: Gives the sizes.
        layer: The inputs of the layer.
        y: Its output [T, B, D*R].
        dgates: Gradients of the gate sums [D, T, B, 4H].
        bias: Gradients of both biases, which are one [D, 4H]; None if they are written already.
        lengths: Sequence lengths [B] on the device, or None.
        tokens: The order of `dgates`.
        into: From `new_weight_gradients`.
        scratch: For what is rounded up, and the hidden states that went into the steps.
    """
    size, width, hidden = problem.hidden_size, problem.state_size, hidden_of(problem.hidden_size)
    runs = recurrent_runs(problem.cell)
    with scratch.frame():
        x, wanted, copies = tokens.flat(layer.x), [], []
        if (lengths is not None and not layer.ends_in_zeros) or not is_wide(x):
            wanted = [Operand(layer.x)]
            x, *_ = copies = [wanted[0].new(tokens, scratch)]
        each = len(into) // len(layer.weights)
        waiting: list[list[Product]] = []
        for direction in range(len(layer.weights)):
            w_ih, w_hh, *both = into[direction * each : (direction + 1) * each]
            outputs = y if len(layer.weights) == 1 else y[..., direction * width : (direction + 1) * width]
            share, state = dgates[direction], layer.h0[direction]
            of_steps = tokens.flat(share)
            sums, of_x = of_steps.t(), of_input(of_steps, len(problem.cell.gates) * hidden).t()
            # Each step's gradient meets the hidden state that went into the step, which for the first is h0.
            at_once = lengths is not None or tokens.time == 1 or tokens.by_row or copies_states(problem)
            with scratch.frame():
                if not at_once:
                    parts = _by_steps(direction, share, outputs, state)
                elif tokens.time == 1 and lengths is None:
                    parts = [(sums, columns_widened(state, scratch))]
                else:
                    wanted.append(states_before(outputs, state, direction))
                    copies.append(wanted[-1].new(tokens, scratch))
                    parts = [(sums, copies[-1])]
                if wanted:
                    operands.write(wanted, copies, tokens, lengths)
                    wanted, copies = [], []
                parts = _in_stretches(problem, parts)
                if at_once:
                    _product(of_x, x, size, w_ih, scratch)
                    for run in runs:
                        first, *others = _of_run(run, parts, hidden)
                        _product(*first, size, run.rows_of(w_hh, size), scratch, *others)
                else:
                    recurrent = [
                        Product(*part, run.rows_of(w_hh, size), adds=index > 0)
                        for run in runs
                        for index, part in enumerate(_of_run(run, parts, hidden))
                    ]
                    waiting.append([Product(of_x, x, w_ih), *recurrent])
            if bias is not None and both:
                write_biases(problem, bias[direction], *both)
        for each_direction in zip(*waiting, strict=True):
            # As a batch, libraries add up exact products in longer chains, which are less precise.
            multiply(each_direction, size, scratch, as_batch=not exact_products(problem))


def _of_run(run: Run, parts: list[Factors], hidden: int) -> list[Factors]:
    # The first factor has a row for each value of a token's sums.
    if run.number == SUMS:
        return parts
    return [(run.columns_of(left.t(), hidden).t(), right) for left, right in parts]


def _in_stretches(problem: Problem, products: list[Factors]) -> list[Factors]:
    # cuDNN adds up this gradient in shorter stretches than the library, that of the input weights as the library does.
    if not exact_products(problem):
        return products
    multiprocessors = Device.probe(products[0][0].device).multiprocessors
    return in_stretches(products, multiprocessors, of_full=_STRETCHES_OF_FULL)


class Product(NamedTuple):
    """A product on its way into a matrix; `adds` to what is there, or takes its place."""

    left: Tensor
    right: Tensor
    into: Tensor
    adds: bool = False


def multiply(products: Sequence[Product], size: int, scratch: Scratch, *, as_batch: bool) -> None:
    """Make the same product of each direction; both at once if they may be a batch, and lie in memory as one."""
    whole = all(product.into.shape == (product.left.shape[0], product.right.shape[1]) for product in products)
    stacks = [_as_batch(*tensors) for tensors in zip(*[product[:3] for product in products], strict=True)]
    batch = [stack for stack in stacks if stack is not None]
    if as_batch and whole and len(products) == 2 and len(batch) == len(stacks):
        left, right, into = batch
        deep_products.bmm(left, right, into, adds=products[0].adds)
        return
    for left, right, into, adds in products:
        deep_products.addmm(into, left, right) if adds else _product(left, right, size, into, scratch)


def _as_batch(first: Tensor, *second: Tensor) -> Tensor | None:
    """Return two matrices as one [2, ...] where they are, or None if that cannot be."""
    (other,) = second or (first,)
    distance = other.storage_offset() - first.storage_offset()
    alike = first.shape == other.shape and first.stride() == other.stride()
    if not alike or distance < 0 or first.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return None
    return first.as_strided((2, *first.shape), (distance, *first.stride()))


def _by_steps(direction: int, dgates: Tensor, outputs: Tensor, state: Tensor) -> list[Factors]:
    """Return the factors of each row's first step, and those of the others, which are outputs where they are."""
    first, others, before = dgates[0], dgates[1:], outputs[:-1]
    if direction == 1:
        first, others, before = dgates[-1], dgates[:-1], outputs[1:]
    return [(first.t(), state), (others.flatten(0, 1).t(), before.flatten(0, 1))]


def _product(
    left: Tensor, right: Tensor, size: int, into: Tensor, scratch: Scratch, *more: tuple[Tensor, Tensor]
) -> None:
    """Write a product, and others added to it, without what was rounded up."""
    whole = into.shape == (left.shape[0], right.shape[1])
    with scratch.frame():
        total = into if whole else scratch.new_empty(left.shape[0], right.shape[1])
        deep_products.mm(left, right, total)
        for pair in more:
            deep_products.addmm(total, *pair)
        if not whole:
            gates_narrowed(total, size, into.shape[1], into)


def new_bias_gradients(together: int, directions: int, hidden: int, scratch: Scratch, count: int) -> Tensor:
    """Return unwritten memory for the gradients of the biases that so many launches find, as in cuda/backward.cu."""
    if together > 1:
        return scratch.new_empty(count, together, directions, 4 * hidden, dtype=torch.float32)
    return scratch.new_empty(count, 2, directions, 4 * hidden)


def summed_bias_gradients(found: Tensor, together: int, scratch: Scratch) -> Tensor:
    """Return the sums [D, 4H] of what launches found."""
    parts = found.flatten(0, 1) if together > 1 else found[:, 0]
    return torch.sum(parts, 0, dtype=torch.float32, out=scratch.new_empty(parts.shape[1:], dtype=torch.float32))


def write_biases(problem: Problem, found: Tensor, b_ih: Tensor, b_hh: Tensor) -> None:
    """Write the gradients of both biases from those of the sums [4H], without what was rounded up."""
    size, gates, runs = problem.hidden_size, len(problem.cell.gates), recurrent_runs(problem.cell)
    narrow = found.unflatten(0, (SUMS, -1))[:, :size]
    if gates == SUMS and len(runs) == 1 and lie_side_by_side(b_ih, b_hh):
        b_ih.as_strided((2, SUMS, size), (SUMS * size, size, 1)).copy_(narrow)
        return
    b_ih.view(gates, size).copy_(narrow[:gates])
    for run in runs:
        into = b_hh.view(gates, size)[run.gates : run.gates + run.number]
        into.copy_(narrow[run.sums : run.sums + run.number])


def lie_side_by_side(first: Tensor, second: Tensor) -> bool:
    """Whether a vector begins in memory where another one ends."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and second.data_ptr() == first.data_ptr() + first.nbytes


def last_steps(lengths: Tensor) -> Tensor:
    """Return each sequence's last step; 0 for a sequence of length 0."""
    return (lengths - 1).clamp(min=0)


def begun(h0: Tensor, lengths: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return states [D, B, H] with zeros for sequences of length 0, which may hold anything."""
    empty = torch.le(lengths, 0, out=(scratch or lengths).new_empty(lengths.shape, dtype=torch.bool))
    return (scratch or h0).new_empty(h0.shape).copy_(h0).masked_fill_(empty.unsqueeze(1), 0)


def without_padding(
    x: Tensor, lengths: Tensor, start: int = 0, *, into: Tensor | None = None, scratch: Scratch | None = None
) -> Tensor:
    """Return x [T, B, I], which begins at step `start`, with zeros beyond the ends of its sequences."""
    # What lies there may be anything, and 0 x NaN is NaN.
    (time, batch, _), marks = x.shape, scratch or lengths
    steps = torch.arange(start, start + time, out=marks.new_empty(time, dtype=torch.int64)).unsqueeze(1)
    outside = torch.ge(steps, lengths, out=marks.new_empty(time, batch, dtype=torch.bool))
    return (torch.empty_like(x) if into is None else into).copy_(x).masked_fill_(outside.unsqueeze(2), 0)

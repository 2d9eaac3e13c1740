"""The matrix products outside the kernels, over all time steps: of the input, and for gradients of x and weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract import early_gradients, token_factors
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.long_products import Factors, in_stretches
from gatewise.kernels.cuda.precision import products_in_tf32
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.launches import Operand, Tokens
from gatewise.kernels.persistent.sizes import memory
from gatewise.kernels.persistent.sizes.exactness import exact_products
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.stack import Layer
from gatewise.kernels.sums import SUMS, Run, of_input, recurrent_runs

_STRETCHES_OF_FULL = 3
_NO_CHANGE = contextlib.nullcontext()


def memory_for_zeros(problem: Problem, scratch: Scratch) -> Scratch | None:
    """Return the memory for the zeros that are added to exact products of a few rows; None if products are in TF32."""
    return scratch if exact_products(problem) else None


def in_precision_of(problem: Problem, like: Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context in which float32 matrix products have the precision of the kernel's own: TF32 or exact.

    Args:
        problem: The problem.
        like: A tensor of the device of the products.
    """
    if problem.dtype != torch.float32 or like.is_meta:
        return _NO_CHANGE
    return products_in_tf32(problem.replace(allow_tf32=not exact_products(problem)))


def input_sums(
    problem: Problem,
    x: Tensor,
    weights: Sequence[DirectionWeights],
    gates: Sequence[Tensor],
    scratch: Scratch,
    keep: Sequence[Tensor] = (),
) -> None:
    """Write x W_ih^T [tokens, GH] of each direction to the first columns of its gate sums.

    Args:
        problem: The problem.
        x: The input [tokens, I], I padded.
        weights: The weights of each direction.
        gates: The gate sums of each direction [tokens, 4H].
        scratch: The memory for padded weights.
        keep: The memory for padded weights that are kept, of each direction, or nothing.
    """
    with scratch.frame():
        matrices = buffers.pad_gates_of_directions([own.w_ih for own in weights], problem, scratch, keep)
        into = [of_input(own, matrix.shape[0]) for own, matrix in zip(gates, matrices, strict=True)]
        if exact_products(problem):
            for matrix, own in zip(matrices, into, strict=True):
                deep_products.mm(x, matrix.t(), own, memory=scratch)
            return
        products = [Product(((x, matrix.t()),), own) for matrix, own in zip(matrices, into, strict=True)]
        multiply(products, problem.hidden_size, scratch, as_batch=True)


def add_to_first_steps(gates: Tensor, first: list[Tensor], lengths: Tensor | None) -> None:
    """Add values [B, 4H] to the gate sums [D, T, B, 4H] of each direction's first step."""
    gates[0, 0] += first[0]
    if len(first) == 1:
        return
    if lengths is None:
        gates[1, -1] += first[1]
    else:
        at = buffers.last_steps(lengths), torch.arange(gates.shape[2], device=gates.device)
        gates[1][at] += first[1]


def input_gradient(
    problem: Problem,
    dsums: list[Tensor],
    weights: list[DirectionWeights],
    into: Tensor,
    scratch: Scratch,
    kept: Sequence[Tensor] = (),
) -> None:
    """Compute the gradient of x from the gradients of the gate sums.

    Args:
        problem: The problem.
        dsums: The gradients of the gate sums of each direction [tokens, 4H].
        weights: The weights of each direction.
        into: The memory for the gradient [tokens, I], contiguous.
        scratch: The memory for padded matrices.
        kept: The padded input weights of each direction where they were kept, or nothing.
    """
    rows, features = into.shape
    with scratch.frame():
        wide = features % 8 > 0
        total = scratch.new_empty(rows, hidden_of(features)) if wide else into
        for direction, (share, own) in enumerate(zip(dsums, weights, strict=True)):
            with scratch.frame():
                matrix = kept[direction] if kept else buffers.pad_gates(own.w_ih, problem, scratch)
                dsums_of_input = of_input(share, matrix.shape[0])
                if direction == 0:
                    deep_products.mm(dsums_of_input, matrix, total, memory=memory_for_zeros(problem, scratch))
                else:
                    deep_products.addmm(total, dsums_of_input, matrix, memory_for_zeros(problem, scratch))
        if wide:
            launches.resized(total, rows, features, into=into)


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
    *,
    dinput: Tensor | None = None,
) -> None:
    """Compute the gradients of a layer's weights, except projections, or leave the factors of matrices to a receiver.

    Args:
        problem: The problem.
        layer: The inputs of the layer; its h0 is that of the first recurrent product.
        y: The hidden states that each step hands to the recurrent product of the next [T, B, D*R], R padded or not: the
            output of the layer, unless recurrent dropout changes it.
        dgates: The gradients of the gate sums [D, T, B, 4H].
        bias: The gradients of the gate sums, added up over all tokens [D, 4H], of which those of the biases are
            made; None if the latter are written already.
        lengths: The sequence lengths [B] on the device, or None.
        tokens: The order of `dgates`.
        into: The memory for the gradients, from `buffers.new_weight_gradients`.
        scratch: The memory for padded matrices and gathered hidden states.
        dinput: The gradients of the sums with an input product [D, T, B, 4H] where they have a tensor of their own;
            column k of `dgates` then belongs to gate k. None where `dgates` has all sums.
    """
    width, directions = problem.state_size, len(layer.weights)
    # Each step's gradient is multiplied with the hidden state that the step read, which for the first is h0, and for a
    # step that begins an episode zero.
    selected = lengths is not None or layer.resets is not None
    single = tokens.time == 1 and not selected
    copied = selected or tokens.by_row or memory.copies_states(problem)
    share = y.shape[-1] // directions
    outputs = [y if y.shape[-1] == width else y[..., start : start + width] for start in range(0, y.shape[-1], share)]
    each = len(into) // directions
    receiver = token_factors.receiver.get()
    with scratch.frame():
        own = None if receiver is None else _Factors.of(receiver.new(layer.x))
        x, wanted, copies = tokens.flat(layer.x), [], []
        if own is not None or (lengths is not None and not layer.ends_in_zeros) or not buffers.is_aligned(x):
            wanted = [Operand(layer.x)]
            x, *_ = copies = [wanted[0].new(tokens, scratch) if own is None else own.x]
        before: Sequence[Tensor] = ()
        if own is not None or (copied and not single):
            states = [buffers.states_before(outputs[place], layer.h0[place], place) for place in range(directions)]
            if own is not None:
                before = own.before
            else:  # in one piece of memory, so that the products of both directions can be a batch
                before = scratch.new_empty(directions, tokens.time * tokens.batch, hidden_of(width)).unbind()
            wanted, copies = [*wanted, *states], [*copies, *before]
        if wanted:
            launches.write_operands(wanted, copies, tokens, lengths, layer.resets)
        of_steps = [tokens.flat(sums) for sums in dgates]
        of_inputs = of_steps if dinput is None else [tokens.flat(sums) for sums in dinput]
        for direction in range(directions):
            both = into[direction * each + 2 : (direction + 1) * each]
            if bias is not None and both:
                write_biases(problem, bias[direction], *both)
        matrices = [(into[direction * each], into[direction * each + 1]) for direction in range(directions)]
        if own is not None and receiver is not None:
            for sums, room in zip(of_steps, own.dsums, strict=True):
                torch.mul(sums, receiver.scale, out=room)
            receiver.leave(functools.partial(_from_factors, problem, matrices))
            return
        recurrent: list[list[Factors]] = []
        for direction in range(directions):
            if before:
                parts = [(of_steps[direction].t(), before[direction])]
            elif single:
                parts = [(of_steps[direction].t(), buffers.pad_columns(layer.h0[direction], scratch))]
            else:
                parts = _by_steps(direction, dgates[direction], outputs[direction], layer.h0[direction])
            recurrent.append(_in_stretches(problem, parts, scratch.device))
        runs = None if dinput is None else (Run(0, 0, len(problem.cell.gates), adds=False),)
        _multiply_all(problem, x, of_inputs, recurrent, matrices, scratch, runs)


class _Factors(NamedTuple):
    """The factors of a layer's gradients that processes exchange (`gatewise.contract.token_factors`).

    Attributes:
        x: The inputs [tokens, I], I padded.
        dsums: The gradients of the gate sums of each direction [tokens, 4H], H padded.
        before: The hidden states that the steps of each direction read [tokens, R], R padded.
    """

    x: Tensor
    dsums: Sequence[Tensor]
    before: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Factors:
        """Return the factors from the order of `sizes.gradients.factor_widths`."""
        x, *others = tensors
        return cls(x, others[: len(others) // 2], others[len(others) // 2 :])


def _from_factors(
    problem: Problem, matrices: Sequence[tuple[Tensor, Tensor]], factors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the matrices of each direction, which are written to their memory."""
    x, dsums, before = _Factors.of(factors)
    recurrent: list[list[Factors]] = [[(sums.t(), states)] for sums, states in zip(dsums, before, strict=True)]
    _multiply_all(problem, x, dsums, recurrent, matrices, Scratch(x))
    return [matrix for pair in matrices for matrix in pair]


def _multiply_all(
    problem: Problem,
    x: Tensor,
    of_inputs: Sequence[Tensor],
    recurrent: Sequence[list[Factors]],
    into: Sequence[tuple[Tensor, Tensor]],
    scratch: Scratch,
    runs: Sequence[Run] | None = None,
) -> None:
    """Write the gradients of the matrices of each direction.

    Args:
        problem: The problem.
        x: The inputs [tokens, I], I padded.
        of_inputs: The gradients of the sums with an input product, of each direction [tokens, 4H].
        recurrent: The factors of the recurrent product of each direction, for all gate sums.
        into: The memory for the gradients of the input weights and the recurrent weights of each direction.
        scratch: The memory for padded matrices.
        runs: The sums that the recurrent product contributes to; None for those of the cell.
    """
    size, hidden, gates = problem.hidden_size, hidden_of(problem.hidden_size), len(problem.cell.gates)
    of_directions: list[list[Product]] = []
    for parts, (_, w_hh) in zip(recurrent, into, strict=True):
        each = recurrent_runs(problem.cell) if runs is None else runs
        of_directions.append([Product(tuple(_of_run(run, parts, hidden)), run.rows_of(w_hh, size)) for run in each])
    # As a batch, libraries add up exact products in longer chains, which are less precise.
    as_batch = not exact_products(problem)
    for each_direction in zip(*of_directions, strict=True):
        multiply(each_direction, size, scratch, as_batch=as_batch)
    _note([w_hh for _, w_hh in into])
    products = [
        Product(((of_input(sums, gates * hidden).t(), x),), w_ih)
        for sums, (w_ih, _) in zip(of_inputs, into, strict=True)
    ]
    multiply(products, size, scratch, as_batch=as_batch)
    _note([w_ih for w_ih, _ in into])


def _note(gradients: Sequence[Tensor]) -> None:
    for gradient in gradients:
        early_gradients.note(gradient)


def _of_run(run: Run, parts: list[Factors], hidden: int) -> list[Factors]:
    # The first factor has a row for each value of a token's sums.
    if run.number == SUMS:
        return parts
    return [(run.columns_of(left.t(), hidden).t(), right) for left, right in parts]


def _in_stretches(problem: Problem, products: list[Factors], device: Device) -> list[Factors]:
    # cuDNN adds up this gradient in shorter stretches than the library, that of the input weights as the library does.
    if not exact_products(problem):
        return products
    return in_stretches(products, device.multiprocessors, of_full=_STRETCHES_OF_FULL)


class Product(NamedTuple):
    """A sum of matrix products with the memory for its result.

    Attributes:
        factors: The left and the right factor of each product.
        into: The memory for the result, without padding.
        adds: Whether the sum is added to the values there, or replaces them.
    """

    factors: tuple[Factors, ...]
    into: Tensor
    adds: bool = False


def multiply(products: Sequence[Product], size: int, scratch: Scratch, *, as_batch: bool) -> None:
    """Compute the same product of each direction; as one batch if `as_batch` and their memory allows it."""
    if as_batch and len(products) == 2 and all(map(_is_whole, products)):
        into = _as_batch(*[product.into for product in products])
        pairs = zip(*[product.factors for product in products], strict=True)
        batches = [[_as_batch(*each) for each in zip(*pair, strict=True)] for pair in pairs]
        factors = [(left, right) for left, right in batches if left is not None and right is not None]
        if into is not None and len(factors) == len(batches):
            for number, pair in enumerate(factors):
                deep_products.bmm(*pair, into, adds=products[0].adds or number > 0)
            return
    for product in products:
        _sum(product, size, scratch)


def _is_whole(product: Product) -> bool:
    """Whether the factors have no padding, so that the result can be written where it belongs."""
    left, right = product.factors[0]
    return product.into.shape == (left.shape[0], right.shape[1])


def _as_batch(first: Tensor, *second: Tensor) -> Tensor | None:
    """Return two matrices as a view [2, ...], or None if their memory does not allow it."""
    (other,) = second or (first,)
    distance = other.storage_offset() - first.storage_offset()
    alike = first.shape == other.shape and first.stride() == other.stride()
    if not alike or distance < 0 or first.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return None
    return first.as_strided((2, *first.shape), (distance, *first.stride()))


def _by_steps(direction: int, dgates: Tensor, outputs: Tensor, state: Tensor) -> list[Factors]:
    """Return the factors of the first step, and of all others, which are views of the outputs."""
    first, others, before = dgates[0], dgates[1:], outputs[:-1]
    if direction == 1:
        first, others, before = dgates[-1], dgates[:-1], outputs[1:]
    return [(first.t(), state), (others.flatten(0, 1).t(), before.flatten(0, 1))]


def _sum(product: Product, size: int, scratch: Scratch) -> None:
    """Compute a sum of products; the memory for it may be float32 where the factors have 16 bits."""
    (left, right), *others = product.factors
    into = product.into
    with scratch.frame():
        whole = product.adds or _is_whole(product)
        total = into if whole else scratch.new_empty(left.shape[0], right.shape[1], dtype=into.dtype)
        if product.adds:
            deep_products.addmm(total, left, right)
        else:
            deep_products.mm(left, right, total)
        for pair in others:
            deep_products.addmm(total, *pair)
        if not whole:
            buffers.crop_gates(total, size, into.shape[1], into)


def total_of_bias_sums(found: Tensor, together: int, scratch: Scratch) -> Tensor:
    """Return the totals [D, 4H] of the partial sums of some launches, from `buffers.new_bias_sums`."""
    parts = found.flatten(0, 1) if together > 1 else found[:, 0]
    return torch.sum(parts, 0, dtype=torch.float32, out=scratch.new_empty(parts.shape[1:], dtype=torch.float32))


def write_biases(problem: Problem, found: Tensor, b_ih: Tensor, b_hh: Tensor) -> None:
    """Write the gradients of both biases from those of the gate sums [4H], without padding."""
    size, gates, runs = problem.hidden_size, len(problem.cell.gates), recurrent_runs(problem.cell)
    unpadded = found.unflatten(0, (SUMS, -1))[:, :size]
    if gates == SUMS and len(runs) == 1 and _are_neighbours(b_ih, b_hh):
        b_ih.as_strided((2, SUMS, size), (SUMS * size, size, 1)).copy_(unpadded)
        return
    b_ih.view(gates, size).copy_(unpadded[:gates])
    for run in runs:
        into = b_hh.view(gates, size)[run.gates : run.gates + run.number]
        into.copy_(unpadded[run.sums : run.sums + run.number])


def _are_neighbours(first: Tensor, second: Tensor) -> bool:
    """Whether one vector begins in memory where another one ends."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and second.data_ptr() == first.data_ptr() + first.nbytes

"""The matrix products after the loop in TF32, as float16 products with the same number of mantissa bits.

They give the gradients of x and of the weights. cuBLAS multiplies transposed TF32 factors at about a third of the rate
of float16 factors. Float16 has TF32's ten mantissa bits, but not its exponents. Factors are therefore multiplied by
powers of two, and the results divided by them (`cuda/scales.cuh`). With dG [tokens, 4H] the gradients of the gate sums,
and h the hidden states that the steps read:

    dG'_n = 2^a_n dG_n                  the largest value of each token's row is in [2^14, 2^15)
    W'    = 2^w W_ih                    the largest value is in [2^14, 2^15)
    x'_n  = 2^(c - a_n) x_n             for the tokens with the largest terms, the largest value is in [2^14, 2^15)
    h'_n  = 2^(d - a_n) h_n             likewise
    dx_n  = 2^-(a_n + w) dG'_n W'
    dW_ih = 2^-c dG'^T x',  dW_hh = 2^-d dG'^T h'

The largest terms are those of the token for which the product of its largest gradient and its largest x, both rounded
down to powers of two, is largest. Tokens where one of them is zero have no terms, so that c does not depend on a large
x whose gradients are zero.

Each factor is rounded to a relative error of 2^-11, as in TF32. Factors below 2^-14 have an absolute error of up to
2^-25 instead. For dG and W_ih, that is 2^-39 of the largest value of the row or matrix. In a sum over tokens, a factor
with that error changes its term by less than 2^15 2^-25, because the other factor is below 2^15. In the same scale, the
product of the largest gradient and the largest x of the token with the largest terms is at least 2^28. A term thus
loses less than 2^-38 of that product, which is itself a term of one element of the result (for the W_hh of a GRU, it
may have the gradient of n's other sum).

Factors that are too small become zeros; an infinity may therefore give NaN where TF32 gives an infinity. NaN gives NaN.

Apart from W', factors take no memory where x has at most twice as many features as there are hidden units: dG' is in
the first half of each row of dG, x' and h' are in the second half, and before them the product for the gradient of x is
there, if that needs memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.precision import sums_in_float32
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.launches import HalfResult, Matrix, Operand, Part, Rows, Scale, Tokens
from gatewise.kernels.persistent.sizes.tilings import hidden_of
from gatewise.kernels.stack import Layer
from gatewise.kernels.sums import input_runs, of_input, recurrent_runs


class _Direction(NamedTuple):
    """The factors of a direction, and what determines their powers of two.

    Attributes:
        factor: The gradients of the gate sums [tokens, 4H], float16, in the first half of each row of the float32 ones.
        free: The second half of each row [tokens, 4H], as float16 values that are not used.
        exponents: The exponent of the largest value of each row [tokens], int32.
        w_ih: The input weights.
        largest: The bits of their largest magnitude, int32.
        operands: The other factors of the sums over tokens: the hidden states before each step and the inputs;
            nothing if they are not wanted.
        largest_terms: For each, the exponent of the largest terms, int32.
    """

    factor: Tensor
    free: Tensor
    exponents: Tensor
    w_ih: Tensor
    largest: Tensor
    operands: tuple[Operand, ...]
    largest_terms: tuple[Tensor, ...]


def gradients(
    problem: Problem,
    layer: Layer,
    y: Tensor,
    dgates: Tensor,
    lengths: Tensor | None,
    tokens: Tokens,
    dx: Tensor | None,
    into: Sequence[tuple[Tensor, Tensor]],
    scratch: Scratch,
) -> None:
    """Compute the gradients of x and of the matrices of a layer, except projections.

    Args:
        problem: The problem.
        layer: The inputs of the layer, as in `matrix_products.weight_gradients`.
        y: The hidden states, as there.
        dgates: The gradients of the gate sums [D, T, B, 4H], which are overwritten.
        lengths: The sequence lengths [B] on the device, or None.
        tokens: The order of `dgates`.
        dx: The memory for the gradient of x [tokens, I], contiguous, or None.
        into: The memory for the gradients of W_ih and W_hh of each direction, or nothing.
        scratch: The memory for everything else.
    """
    operands = _operands(problem, layer, y) if into else [()] * len(layer.weights)
    with scratch.frame(), sums_in_float32():
        found = scratch.new_empty(len(operands), 3, dtype=torch.int32)
        places = zip(layer.weights, operands, launches.fill_unwritten(found), strict=True)
        rows, matrices, each = [], [], []
        for direction, (weights, own_operands, own_found) in enumerate(places):
            values, w_ih = tokens.flat(dgates[direction]), weights.w_ih.contiguous()
            exponents = scratch.new_empty(values.shape[0], dtype=torch.int32)
            largest, *terms = own_found.unbind()
            rows.append(Rows(values, exponents, own_operands, terms))
            matrices.append(Matrix(w_ih, largest))
            factor, free = values.view(torch.float16).chunk(2, 1)
            each.append(_Direction(factor, free, exponents, w_ih, largest, own_operands, tuple(terms)))
        launches.halve_rows(rows, [] if dx is None else matrices, tokens, lengths, layer.resets)
        if dx is not None:
            _input_gradient(problem, each, dx, scratch)
        if into:
            _weight_gradients(problem, each, tokens, lengths, layer.resets, into, scratch)


def _operands(problem: Problem, layer: Layer, y: Tensor) -> list[tuple[Operand, ...]]:
    """Return the hidden states that the steps of each direction read, and the inputs."""
    x, width = Operand(layer.x).with_contiguous_rows(), y.shape[-1] // len(layer.weights)
    found = []
    for direction, first in enumerate(layer.h0):
        outputs = y[..., direction * width :][..., : problem.state_size]  # without padding
        found.append((buffers.states_before(outputs, first, direction).with_contiguous_rows(), x))
    return found


def _input_gradient(problem: Problem, each: list[_Direction], dx: Tensor, scratch: Scratch) -> None:
    features, parts = dx.shape[1], []
    columns = hidden_of(features)
    with scratch.frame():
        for direction, own in enumerate(each):
            first_fits = direction == 0 and columns == features
            product = dx if first_fits else _room(own.free, columns, torch.float32, scratch)
            with scratch.frame():
                rows, gates = hidden_of(problem.hidden_size), len(problem.cell.gates)
                factor = launches.halved(own.w_ih, rows, columns, gates, own.largest, scratch)
                deep_products.mm(of_input(own.factor, factor.shape[0]), factor, product)
            parts.append(Part(product, exponents=own.exponents, largest=own.largest))
        launches.write_results([HalfResult(tuple(parts), dx)])


def _room(free: Tensor, columns: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Return memory [tokens, columns] for a product or a factor, which is part of `free` where that suffices."""
    values = free.view(dtype)
    if columns <= values.shape[1]:
        return values[:, :columns]
    return scratch.new_empty(free.shape[0], columns, dtype=dtype)


def _weight_gradients(
    problem: Problem,
    each: list[_Direction],
    tokens: Tokens,
    lengths: Tensor | None,
    resets: Tensor | None,
    into: Sequence[tuple[Tensor, Tensor]],
    scratch: Scratch,
) -> None:
    with scratch.frame():
        copies = [_memory_of_copies(own, scratch) for own in each]
        wanted = [operand for own in each for operand in own.operands]
        scales = [Scale(own.exponents, term) for own in each for term in own.largest_terms]
        launches.write_operands(wanted, [*itertools.chain(*copies)], tokens, lengths, resets, scales)
        for own, factors, (w_ih, w_hh) in zip(each, copies, into, strict=True):
            _products(problem, own, factors, (w_hh, w_ih), scratch)


def _memory_of_copies(own: _Direction, scratch: Scratch) -> tuple[Tensor, Tensor]:
    states, x = [hidden_of(operand.source.shape[2]) for operand in own.operands]
    # Hidden states always fit, because a row has four times as many values.
    return own.free[:, :states], _room(own.free[:, states:], x, torch.float16, scratch)


def _products(
    problem: Problem,
    own: _Direction,
    factors: tuple[Tensor, Tensor],
    into: tuple[Tensor, Tensor],
    scratch: Scratch,
) -> None:
    """Write the gradients of a direction's W_hh and W_ih."""
    hidden, gates = hidden_of(problem.hidden_size), len(problem.cell.gates)
    runs = recurrent_runs(problem.cell), input_runs(problem.cell)
    in_place = []
    for factor, term, result, own_runs in zip(factors, own.largest_terms, into, runs, strict=True):
        shape = gates * hidden, factor.shape[1]
        with scratch.frame():
            product = result if result.shape == shape else scratch.new_empty(shape)
            for run in own_runs:
                deep_products.mm(run.columns_of(own.factor, hidden).t(), factor, run.rows_of(product, hidden))
            scaled = HalfResult((Part(product, term),), result, gates)
            if product is result:
                in_place.append(scaled)
            else:  # one after the other, which takes less memory
                launches.write_results([scaled])
    if in_place:
        launches.write_results(in_place)

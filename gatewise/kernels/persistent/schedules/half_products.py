"""The matrix products after the loop in TF32, as float16 products with the same number of mantissa bits.

They give the gradients of x and of the weights. cuBLAS multiplies transposed TF32 factors at about a third of the rate
of float16 factors. Float16 has TF32's ten mantissa bits, but not its exponents. Factors are therefore multiplied by
powers of two, and the results divided by them (`cuda/scales.cuh`). With dG [tokens, 4H] the gradients of the gate sums,
and h the hidden states that the steps read:

    dG'_n  = 2^a_n dG_n                 the largest value of each token's row is in [2^14, 2^15)
    W'_.j  = 2^w_j W_ih_.j              the largest value of each column is in [2^14, 2^15)
    x'_nj  = 2^(c_j - a_n) x_nj         for the token with the column's largest terms, the value is in [2^14, 2^15)
    h'_nj  = 2^(d_j - a_n) h_nj         likewise
    dx_nj  = 2^-(a_n + w_j) (dG' W')_nj
    dW_ih_.j = 2^-c_j (dG'^T x')_.j,    dW_hh_.j = 2^-d_j (dG'^T h')_.j

The largest terms of a column j of x are those of the token n for which the product of its largest gradient and x_nj,
both rounded down to powers of two, is largest. Tokens where one of them is zero have no terms, so that c_j does not
depend on a large x whose gradients are zero. No column depends on another one.

Each factor is rounded to a relative error of 2^-11, as in TF32. Factors below 2^-14 have an absolute error of up to
2^-25 instead. For dG that is 2^-39 of the largest value of the row, for W_ih of the column. In a sum over tokens, a
factor with that error changes its term by less than 2^15 2^-25, because the other factor is below 2^15. In the same
scale, the product of the largest gradient and of x_nj, for the token with the column's largest terms, is at least 2^28.
A term thus loses less than 2^-38 of that product, which is itself a term of one element of the same column of the
result (for the W_hh of a GRU, it may have the gradient of n's other sum).

Factors that are too small become zeros; an infinity may therefore give NaN where TF32 gives an infinity. NaN gives NaN.

Apart from W', factors take no memory: dG' is in the first half of each row of dG, x' and h' are in the second half, and
before them the product for the gradient of x is there, if that needs memory. Where the columns of x do not fit there,
they are multiplied in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.precision import sums_in_float32
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.persistent import buffers, launches
from gatewise.kernels.persistent.launches import Columns, HalfResult, Operand, Part, Rows, Scale, Tokens
from gatewise.kernels.persistent.sizes import half_operands
from gatewise.kernels.persistent.sizes.padding import hidden_of
from gatewise.kernels.stack import Layer
from gatewise.kernels.sums import input_runs, of_input, recurrent_runs


class _Factor(NamedTuple):
    """A factor of a sum over tokens.

    Attributes:
        operand: The values.
        scale: The exponents that determine the powers of two of the values.
        copy: The memory [tokens, any] for all columns of the factor, padded, or as many as fit there at once.
    """

    operand: Operand
    scale: Scale
    copy: Tensor

    def columns(self, start: int) -> _Factor:
        """Return the factor with as many columns as fit at once, from one of them on."""
        end = start + self.copy.shape[1]
        # Hidden states always fit, because a row has four times as many values; so `first` need not be cut.
        operand = self.operand._replace(source=self.operand.source[..., start:end])
        scale = self.scale._replace(largest=self.scale.largest[start:end])
        return _Factor(operand, scale, self.copy[:, : hidden_of(operand.source.shape[2])])


class _Direction(NamedTuple):
    """The factors of a direction, and what determines their powers of two.

    Attributes:
        gradients: The gradients of the gate sums [tokens, 4H], float16, in the first half of each row of the float32
            ones.
        free: The second half of each row [tokens, 4H], as float16 values that are not used.
        exponents: The exponent of the largest value of each row [tokens], int32.
        w_ih: The input weights.
        largest: The exponent of the largest value of each of their columns, int32.
        factors: The other factors of the sums over tokens: the hidden states before each step and the inputs; nothing
            if they are not wanted.
    """

    gradients: Tensor
    free: Tensor
    exponents: Tensor
    w_ih: Tensor
    largest: Tensor
    factors: tuple[_Factor, ...]


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
        values = [layer.weights[0].w_ih, *(operand.source for operand in operands[0])]
        widths = [hidden_of(own.shape[-1]) for own in values]  # so that all exponents are read in words
        found = launches.fill_unwritten(scratch.new_empty(len(operands), sum(widths), dtype=torch.int32))
        rows, each = [], []
        for weights, own, largest, share in zip(layer.weights, operands, found, dgates, strict=True):
            dsums, w_ih = tokens.flat(share), weights.w_ih if dx is None else weights.w_ih.contiguous()
            exponents = scratch.new_empty(dsums.shape[0], dtype=torch.int32)
            rows.append(Rows(dsums, exponents))
            of_matrix, *others = largest.split(widths)
            halves, free = dsums.view(torch.float16).chunk(2, 1)
            factors = _factors(own, [Scale(exponents, other) for other in others], free)
            each.append(_Direction(halves, free, exponents, w_ih, of_matrix, factors))
        launches.halve_rows(rows)
        columns = [Columns(factor.operand, factor.scale) for own in each for factor in own.factors]
        if dx is not None:
            columns += [Columns(Operand(own.w_ih.unsqueeze(1)), Scale(None, own.largest)) for own in each]
        launches.scale_columns(columns, tokens, lengths, layer.resets)
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


def _factors(operands: Sequence[Operand], scales: Sequence[Scale], free: Tensor) -> tuple[_Factor, ...]:
    """Return the factors of a direction with their copies side by side in the memory that is free."""
    found, begin = [], 0
    for operand, scale in zip(operands, scales, strict=True):
        copy = free[:, begin:][:, : hidden_of(operand.source.shape[2])]
        found.append(_Factor(operand, scale, copy))
        begin += copy.shape[1]
    return (*found,)


def _input_gradient(problem: Problem, each: list[_Direction], dx: Tensor, scratch: Scratch) -> None:
    rows, gates = hidden_of(problem.hidden_size), len(problem.cell.gates)
    in_place = dx.shape[1] % 8 == 0
    at_once = half_operands.columns_at_once(problem, dx.shape[1])
    for start in range(0, dx.shape[1], at_once):
        into, parts = dx[:, start : start + at_once], []
        columns = hidden_of(into.shape[1])
        for direction, own in enumerate(each):
            product = into if in_place and direction == 0 else own.free.view(torch.float32)[:, :columns]
            with scratch.frame():
                matrix, largest = own.w_ih[:, start : start + at_once], own.largest[start:]
                factor = launches.halved(matrix, rows, columns, gates, largest, scratch)
                deep_products.mm(of_input(own.gradients, factor.shape[0]), factor, product)
            parts.append(Part(product, largest, own.exponents))
        launches.write_results([HalfResult(tuple(parts), into)])


def _weight_gradients(
    problem: Problem,
    each: list[_Direction],
    tokens: Tokens,
    lengths: Tensor | None,
    resets: Tensor | None,
    into: Sequence[tuple[Tensor, Tensor]],
    scratch: Scratch,
) -> None:
    def write(factors: Sequence[_Factor]) -> None:
        wanted, scales, copies = zip(*factors, strict=True)
        launches.write_operands(wanted, copies, tokens, lengths, resets, scales)

    every = [factor for own in each for factor in own.factors]
    write([factor.columns(0) for factor in every])
    for own, (w_ih, w_hh) in zip(each, into, strict=True):
        _products(problem, own, (w_hh, w_ih), write, scratch)


def _products(
    problem: Problem,
    own: _Direction,
    into: tuple[Tensor, Tensor],
    write: Callable[[Sequence[_Factor]], None],
    scratch: Scratch,
) -> None:
    """Write the gradients of a direction's W_hh and W_ih, whose factors are written from their first columns on."""
    hidden, gates = hidden_of(problem.hidden_size), len(problem.cell.gates)
    runs = recurrent_runs(problem.cell), input_runs(problem.cell)
    in_place = []
    for factor, result, own_runs in zip(own.factors, into, runs, strict=True):
        shape = gates * hidden, hidden_of(result.shape[1])
        with scratch.frame():
            product = result if result.shape == shape else scratch.new_empty(shape)
            for start in range(0, shape[1], factor.copy.shape[1]):
                part = factor.columns(start)
                if start:
                    write([part])
                columns = product[:, start : start + part.copy.shape[1]]
                for run in own_runs:
                    gradients = run.columns_of(own.gradients, hidden).t()
                    deep_products.mm(gradients, part.copy, run.rows_of(columns, hidden))
            scaled = HalfResult((Part(product, factor.scale.largest),), result, gates)
            if product is result:
                in_place.append(scaled)
            else:  # one after the other, which takes less memory
                launches.write_results([scaled])
    if in_place:
        launches.write_results(in_place)

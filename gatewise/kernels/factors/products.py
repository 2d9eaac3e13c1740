"""The matrix products after the loop in TF32, as float16 products with the same number of mantissa bits.

They give the gradients of x and of the weights. cuBLAS multiplies transposed TF32 factors at about a third of the rate
of float16 factors. Float16 has TF32's ten mantissa bits, but not its exponents. Factors are therefore multiplied by
powers of two, and the results divided by them (`cuda/scales.cuh`). With dG [tokens, 4H] the gradients of the gate sums,
and h the hidden states that the steps read:

    dG'_n = 2^a_n dG_n                  the largest value of each token's row is in [2^14, 2^15)
    W'    = 2^w W_ih                    the largest value is in [2^14, 2^15)
    x'_n  = 2^(C - a_n) x_n             for the smallest a_n, the largest value is in [2^14, 2^15); h' likewise
    dx_n  = 2^-(a_n + w) dG'_n W'
    dW_ih = 2^-C dG'^T x',  dW_hh = 2^-C dG'^T h'

Each factor is rounded to a relative error of 2^-11, as in TF32. Factors below 2^-14 have an absolute error of up to
2^-25 instead. For dG and W_ih, that is 2^-39 of the largest value of the row or matrix. In a sum over tokens, a factor
with that error changes its term by less than 2^15 2^-25, because the other factor is below 2^15. That is less than
2^-38 of the product of the largest gradient and the largest x, which is at least 2^28 in this scale.

Factors that are too small become zeros; an infinity may therefore give NaN where TF32 gives an infinity. NaN gives NaN.

Apart from W', factors take no memory: dG' is in the first half of each row of dG, x' and h' are in the second half, and
before them the product for the gradient of x is there, if that needs memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.contract.problem import Problem
from gatewise.kernels.cuda import deep_products
from gatewise.kernels.cuda.precision import sums_in_float32
from gatewise.kernels.cuda.scratch import Scratch
from gatewise.kernels.factors.copies import Operand, Scale, halved, states_before, write_operands
from gatewise.kernels.factors.halves import Factor, HalfResult, Part, halve_rows, new_largest, write_results
from gatewise.kernels.factors.padding import hidden_of
from gatewise.kernels.factors.tokens import Tokens
from gatewise.kernels.stack import Layer
from gatewise.kernels.sums import input_runs, of_input, recurrent_runs


class _Gradients(NamedTuple):
    """The gradients of a direction's gate sums as a float16 factor.

    Attributes:
        factor: The factor [tokens, 4H], float16, in the first half of each row of the float32 gradients.
        free: The second half of each row [tokens, 4H], as float16 values that are not used.
        exponents: The biased exponent of the largest value of each row [tokens], int32.
        largest: The bits of the largest magnitude, int32.
    """

    factor: Tensor
    free: Tensor
    exponents: Tensor
    largest: Tensor


class _Largest(NamedTuple):
    """The bits of the largest finite magnitudes, int32: of the inputs, and for each direction of other factors."""

    x: Tensor
    gradients: list[Tensor]
    states: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def new(cls, directions: int, scratch: Scratch) -> _Largest:
        """Return memory for them."""
        x, *others = new_largest(1 + 3 * directions, scratch)
        return cls(x, others[0::3], others[1::3], others[2::3])


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
        layer: The inputs of the layer, whose x and h0 the steps read.
        y: The hidden states that each step hands to the recurrent product of the next [T, B, D*R], R padded or not.
        dgates: The gradients of the gate sums [D, T, B, S*H], H padded, with S sums; they are overwritten.
        lengths: The sequence lengths [B] on the device, or None.
        tokens: The order of `dgates`.
        dx: The memory for the gradient of x [tokens, I], contiguous, or None.
        into: The memory for the gradients of W_ih and W_hh of each direction, or nothing.
        scratch: The memory for everything else.
    """
    layer, y = layer._replace(x=_with_contiguous_rows(layer.x)), _with_contiguous_rows(y)
    w_ih = [own.w_ih.contiguous() for own in layer.weights]
    outputs = _outputs(problem, y, len(w_ih))
    with scratch.frame(), sums_in_float32():
        largest = _Largest.new(len(w_ih), scratch)
        rows = [tokens.flat(own) for own in dgates]
        exponents = [scratch.new_empty(own.shape[0], dtype=torch.int32) for own in rows]
        factors = [] if dx is None else list(map(Factor, w_ih, largest.weights))
        if into:
            factors.append(Factor(layer.x, largest.x, ragged=not layer.ends_in_zeros))
            for own, first, found in zip(outputs, layer.h0, largest.states, strict=True):
                factors += [Factor(own, found), Factor(first.contiguous(), found, ragged=True)]
        halve_rows(rows, exponents, largest.gradients, factors, lengths)
        halves = list(map(_gradients, rows, exponents, largest.gradients))
        if dx is not None:
            _input_gradient(problem, halves, w_ih, largest, dx, scratch)
        if into:
            _weight_gradients(problem, layer, outputs, halves, lengths, tokens, largest, into, scratch)


def _gradients(rows: Tensor, exponents: Tensor, largest: Tensor) -> _Gradients:
    factor, free = rows.view(torch.float16).chunk(2, 1)
    return _Gradients(factor, free, exponents, largest)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _outputs(problem: Problem, y: Tensor, directions: int) -> list[Tensor]:
    """Return the hidden states of each direction [T, B, R] without padding."""
    places = range(0, y.shape[-1], y.shape[-1] // directions)
    return [y[..., place : place + problem.state_size] for place in places]


def _input_gradient(
    problem: Problem, halves: list[_Gradients], w_ih: list[Tensor], largest: _Largest, dx: Tensor, scratch: Scratch
) -> None:
    features, parts = dx.shape[1], []
    columns = hidden_of(features)
    with scratch.frame():
        for direction, (own, matrix, found) in enumerate(zip(halves, w_ih, largest.weights, strict=True)):
            first_fits = direction == 0 and columns == features
            product = dx if first_fits else _room(own.free, columns, torch.float32, scratch)
            with scratch.frame():
                factor = halved(
                    matrix, hidden_of(problem.hidden_size), columns, len(problem.cell.gates), found, scratch
                )
                deep_products.mm(of_input(own.factor, factor.shape[0]), factor, product)
            parts.append(Part(product, found, exponents=own.exponents))
        write_results([HalfResult(tuple(parts), dx)])


def _room(free: Tensor, columns: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """Return memory [tokens, columns] for a product or a factor, which is part of `free` where that suffices."""
    values = free.view(dtype)
    if columns <= values.shape[1]:
        return values[:, :columns]
    return scratch.new_empty(free.shape[0], columns, dtype=dtype)


def _weight_gradients(
    problem: Problem,
    layer: Layer,
    outputs: list[Tensor],
    halves: list[_Gradients],
    lengths: Tensor | None,
    tokens: Tokens,
    largest: _Largest,
    into: Sequence[tuple[Tensor, Tensor]],
    scratch: Scratch,
) -> None:
    wanted: list[Operand] = []
    copies: list[Tensor] = []
    scales: list[Scale] = []
    with scratch.frame():
        for direction, (own, state) in enumerate(zip(halves, largest.states, strict=True)):
            states = states_before(outputs[direction], layer.h0[direction], direction)
            width = hidden_of(states.source.shape[2])
            # Hidden states always fit, because a row has as many values for every sum.
            kinds = (states, own.free[:, :width], state), (Operand(layer.x), None, largest.x)
            for operand, place, found in kinds:
                wanted.append(operand)
                features = hidden_of(operand.source.shape[2])
                copies.append(_room(own.free[:, width:], features, torch.float16, scratch) if place is None else place)
                scales.append(Scale(own.exponents, own.largest, found))
        write_operands(wanted, copies, tokens, lengths, layer.resets, scales)
        for direction, (own, found) in enumerate(zip(halves, largest.states, strict=True)):
            states, x = copies[2 * direction : 2 * direction + 2]
            _products(problem, own, (x, states), (largest.x, found), into[direction], scratch)


def _products(
    problem: Problem,
    own: _Gradients,
    factors: tuple[Tensor, Tensor],
    largest: tuple[Tensor, Tensor],
    into: tuple[Tensor, Tensor],
    scratch: Scratch,
) -> None:
    """Write the gradients of a direction's W_ih and W_hh."""
    hidden, gates = hidden_of(problem.hidden_size), len(problem.cell.gates)
    runs = input_runs(problem.cell), recurrent_runs(problem.cell)
    in_place = []
    for factor, found, result, own_runs in zip(factors, largest, into, runs, strict=True):
        shape = gates * hidden, factor.shape[1]
        with scratch.frame():
            product = result if result.shape == shape else scratch.new_empty(shape)
            for run in own_runs:
                deep_products.mm(run.columns_of(own.factor, hidden).t(), factor, run.rows_of(product, hidden))
            scaled = HalfResult((Part(product, found, largest_gradient=own.largest),), result, gates)
            if product is result:
                in_place.append(scaled)
            else:  # one after the other, which takes less memory
                write_results([scaled])
    if in_place:
        write_results(in_place)

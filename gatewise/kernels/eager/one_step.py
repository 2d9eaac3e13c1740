"""One time step of one layer of any cell, without gradients.

A layer's pass over a sequence first computes the input products of all steps. A single step has no others to compute
them with, and it should not convert, stack or keep anything for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from gatewise.cells import Cell
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.stages import stages_of
from gatewise.kernels.eager.blocks import is_swept
from gatewise.kernels.eager.statement import step_of

Product = Callable[[Tensor], Tensor]
"""A function that returns the recurrent products [B, G*H] of hidden states [B, R]."""


def one_step(
    cell: Cell, x: Tensor, states: Sequence[Tensor], weights: DirectionWeights, product: Product | None = None
) -> tuple[Tensor, ...]:
    """Return the states after a step.

    Args:
        cell: The cell, as in evaluation mode.
        x: The input [B, I].
        states: The hidden state [B, R] and the other states [B, H], in the dtype of states (`unroll.state_dtype`),
            which is also that of the result.
        weights: The weights of the layer, in the dtype of x.
        product: The function that computes the recurrent products without a bias; None for products with
            `weights.w_hh`, which is otherwise not read.
    """
    h, inner = states[0], states[0].dtype
    rounded = h.to(x.dtype)
    of_input = linear(x, weights.w_ih, weights.b_ih).to(inner)
    if product is None:
        recurrent = linear(rounded, weights.w_hh, weights.b_hh)
    else:
        recurrent = product(rounded)
        recurrent = recurrent if weights.b_hh is None else recurrent + weights.b_hh
    parameters = [parameter.to(inner) for parameter in weights.parameters]
    if is_swept(cell) and len(cell.apart) in (0, len(cell.gates)):
        after = _in_stages(cell, of_input, recurrent, states, parameters)
    else:
        after = step_of(cell)(_sums(cell, of_input, recurrent), *states, *parameters)
    if weights.w_hr is None:
        return after
    return torch.mm(after[0].to(x.dtype), weights.w_hr.t()).to(inner), *after[1:]


def _in_stages(
    cell: Cell, of_input: Tensor, recurrent: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    stages = stages_of(cell)
    own = stages.once(parameters)
    if not cell.apart:
        return stages.step(of_input.add_(recurrent), None, states, (), (), own)
    return stages.step(of_input, recurrent.to(of_input.dtype), states, (), stages.ahead(of_input, own), own)


def _sums(cell: Cell, of_input: Tensor, recurrent: Tensor) -> Tensor:
    """Return the sums of a step [B, S*H], in the order of `Cell.sums`; the input products are overwritten."""
    if not cell.apart:
        return of_input.add_(recurrent)
    count = len(cell.gates)
    of_gates, of_hidden = of_input.chunk(count, -1), recurrent.chunk(count, -1)
    apart = []
    for gate, own, of_state in zip(cell.gates, of_gates, of_hidden, strict=True):
        if gate in cell.apart:
            apart.append(of_state)
        else:
            own.add_(of_state)
    return torch.cat([of_input, *[one.to(of_input.dtype) for one in apart]], -1)

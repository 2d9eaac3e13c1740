"""One direction of one layer: a cell unrolled over time.

All input projections are one matrix product; then come one small product and a few pointwise operators a step.

`forward` is made of differentiable operators only: run while autograd records, it has right derivatives of every order.
(While autograd does not record, each step's product is added to its projected input where that lies, which saves a copy
of the sums and one device kernel a step.) `adjoint` has its backward pass.

Everything pointwise is computed in float32 for half types, otherwise in the dtype itself. A state is a sum over time:
kept in a half type it would lose increments smaller than its last bit, and activations rounded one by one would add
about six roundings a step. With float32 in between, a step in a half type rounds the sums and the hidden state that the
matrix product reads, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.contract.kernel import TensorSpec
from gatewise.contract.problem import Problem
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.pointwise import pointwise_of
from gatewise.kernels.eager.reading import Reading

OverTokens = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The product of two matrices, plus a bias where there is one."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which states, their gradients and everything pointwise are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Kept(NamedTuple):
    """What a forward pass keeps for its backward pass, besides inputs and outputs; all in reading order.

    Reading order is the order of computation: step 0 is a row's first step, or its own last one in the reverse
    direction. Entries past a row's end are meaningless. The tensors live until the backward pass is done; it does not
    change them.

    Attributes:
        sums: The sums that the cell reads [T, B, S*H], in the dtype of x.
        states: Each state beside the hidden one after each step [T, B, H], in `state_dtype`.
    """

    sums: Tensor
    states: tuple[Tensor, ...]

    @staticmethod
    def specs(problem: Problem) -> tuple[TensorSpec, ...]:
        """Return shapes and dtypes of what one direction of one layer keeps."""
        tokens, hidden_size, cell = (problem.time, problem.batch), problem.hidden_size, problem.cell
        state = TensorSpec((*tokens, hidden_size), state_dtype(problem.dtype))
        return (TensorSpec((*tokens, len(cell.sums) * hidden_size), problem.dtype), *[state] * len(cell.states))


class Unrolled(NamedTuple):
    """What a forward pass returns.

    Attributes:
        y: Hidden states in the order of time [T, B, R], zero past each row's end.
        h_n: Hidden state after each row's last step [B, R].
        states_n: The other states after each row's last step [B, H].
        kept: For the backward pass; None when not wanted.
    """

    y: Tensor
    h_n: Tensor
    states_n: tuple[Tensor, ...]
    kept: Kept | None


def forward(
    cell: Cell,
    x: Tensor,
    h0: Tensor,
    states0: Sequence[Tensor],
    weights: DirectionWeights,
    *,
    reverse: bool = False,
    lengths: Tensor | None = None,
    keep: bool = False,
    projected: bool = False,
    over_tokens: OverTokens | None = None,
) -> Unrolled:
    """Run one direction of one layer over a batch of sequences.

    Args:
        cell: The cell.
        x: Input [T, B, I], any strides; values past a row's end are not looked at.
        h0: Initial hidden state [B, R].
        states0: Initial values of the other states [B, H], in the order of `Cell.states`.
        weights: The weights of this direction.
        reverse: Whether each row is read from its own last step to its first.
        lengths: Steps of each row [B], integers in [0, T], any device; None when every row has T. Never waited for.
        keep: Whether to return what `backward` needs.
        projected: Whether x holds the products of the input with the input weights already [T, B, G*H].
        over_tokens: Makes the product that goes over all tokens; `torch.mm` and `torch.addmm` when None.

    Returns:
        Output, final states and what was kept. A row of length 0 hands its initial states through.
    """
    reading, pointwise = Reading.of(x, lengths, reverse), pointwise_of(cell).step
    x = reading.read(x)
    bias = _Biases.of(cell, weights)
    inputs = _sums_given(x, bias) if projected else _projected(x, weights, bias, over_tokens or in_plain_torch)
    inner = state_dtype(x.dtype)
    recurrence = _Recurrence(cell, weights, bias, inputs, keep=keep)
    rounded = reading.started(h0)
    h, states = rounded.to(inner), [reading.started(state).to(inner) for state in states0]
    w_hr = None if weights.w_hr is None else weights.w_hr.t()
    everything = keep or lengths is not None
    hs: list[Tensor] = []
    after: list[list[Tensor]] = [[] for _ in states]
    for t in range(x.shape[0]):
        h, *states = pointwise(recurrence.sums(t, rounded).to(inner), h, *states)
        rounded = h.to(x.dtype) if w_hr is None else torch.mm(h.to(x.dtype), w_hr)
        hs.append(rounded)
        if everything:
            for history, state in zip(after, states, strict=True):
                history.append(state)
    outputs = _stacked(hs, h0)
    last = [
        _stacked(history, state) if everything else state.unsqueeze(0)
        for history, state in zip(after, states, strict=True)
    ]
    return Unrolled(
        reading.turned(reading.masked(outputs)),
        reading.finished(outputs, h0),
        tuple(
            reading.finished(history, state0.to(inner)).to(state0.dtype)
            for history, state0 in zip(last, states0, strict=True)
        ),
        Kept(recurrence.kept(), tuple(last)) if keep else None,
    )


class _Biases(NamedTuple):
    """The biases of a direction, as a cell's sums take them.

    Attributes:
        of_inputs: What is added to the products of the input [G*H], or None.
        of_hidden: What is added to the recurrent products [G*H], where the sums of gates are apart; or None.
    """

    of_inputs: Tensor | None
    of_hidden: Tensor | None

    @classmethod
    def of(cls, cell: Cell, weights: DirectionWeights) -> _Biases:
        """Return the biases of a direction."""
        if weights.b_ih is None or weights.b_hh is None:
            return cls(None, None)
        if not cell.apart:
            return cls(weights.b_ih + weights.b_hh, None)
        of_input, of_hidden = (bias.chunk(len(cell.gates)) for bias in (weights.b_ih, weights.b_hh))
        each = list(zip(of_input, of_hidden, [gate in cell.apart for gate in cell.gates], strict=True))
        return cls(
            torch.cat([one if apart else one + other for one, other, apart in each]),
            torch.cat([other if apart else torch.zeros_like(other) for _, other, apart in each]),
        )


class _Recurrence:
    """The sums of each step, from those of the input and the recurrent products.

    Args:
        cell: The cell.
        weights: The weights of the direction.
        bias: Its biases.
        inputs: The sums of the input [T, B, G*H], which are written over where autograd does not record.
        keep: Whether the sums of all steps are wanted afterwards.
    """

    def __init__(self, cell: Cell, weights: DirectionWeights, bias: _Biases, inputs: Tensor, *, keep: bool) -> None:
        self._cell, self._inputs, self._bias = cell, inputs, bias.of_hidden
        self._w_hh, self._apart = weights.w_hh.t(), [gate in cell.apart for gate in cell.gates]
        self._in_place = not torch.is_grad_enabled()
        self._steps, self._kept = inputs.unbind(0), [] if keep and cell.apart else None

    def sums(self, t: int, h: Tensor) -> Tensor:
        """Return the sums of step t [B, S*H] from the hidden state before it, in the dtype of the products."""
        inputs = self._steps[t]
        if not self._cell.apart:
            return inputs.addmm_(h, self._w_hh) if self._in_place else torch.addmm(inputs, h, self._w_hh)
        recurrent = torch.mm(h, self._w_hh) if self._bias is None else torch.addmm(self._bias, h, self._w_hh)
        count = len(self._cell.gates)
        of_input, of_hidden = inputs.chunk(count, -1), recurrent.chunk(count, -1)
        each = list(zip(of_input, of_hidden, self._apart, strict=True))
        parts = [one if apart else one + other for one, other, apart in each]
        found = torch.cat([*parts, *(other for _, other, apart in each if apart)], -1)
        if self._kept is not None:
            self._kept.append(found)
        return found

    def kept(self) -> Tensor:
        """Return the sums of all steps [T, B, S*H]."""
        if self._kept is None:
            return self._inputs
        batch, size = self._inputs.shape[1], self._inputs.shape[2] // len(self._cell.gates)
        return _stacked(self._kept, self._inputs.new_zeros(batch, len(self._cell.sums) * size))


def _projected(x: Tensor, weights: DirectionWeights, bias: _Biases, over_tokens: OverTokens) -> Tensor:
    product = over_tokens(x.flatten(0, 1), weights.w_ih.t(), bias.of_inputs)
    return product.view(*x.shape[:2], product.shape[1])


def in_plain_torch(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of two matrices, plus a bias where there is one."""
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _sums_given(products: Tensor, bias: _Biases) -> Tensor:
    # Always a new tensor: the steps add to it what comes through the recurrent weights.
    if bias.of_inputs is None:
        return products.clone(memory_format=torch.contiguous_format)
    return products + bias.of_inputs


def _stacked(states: list[Tensor], like: Tensor) -> Tensor:
    # Without steps: nothing, but attached to the initial state, so that autograd can ask for its derivative.
    return torch.stack(states) if states else like.unsqueeze(0)[:0].clone()

"""The forward pass of one direction of one layer: a cell unrolled over time.

The input products of all steps are one matrix product. Each step then runs one small matrix product and a few pointwise
operators.

`forward` consists of differentiable operators: if autograd records it, derivatives of every order are correct. If
autograd does not record, each step's product is added in place to its input product, which saves a copy of the sums and
one GPU kernel per step. The backward pass is in `adjoint`.

For float16 and bfloat16, pointwise operators compute in float32; otherwise in the dtype of the input. A state is a sum
over time: in 16 bits it would lose increments smaller than its last bit, and rounding every activation would add about
six rounding errors per step. With float32, a step rounds only the sums and the hidden state that the matrix product
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import step_cell
from gatewise.cells.cell import Cell
from gatewise.contract.kernel import TensorSpec
from gatewise.contract.problem import Problem
from gatewise.contract.tracing import is_exporting
from gatewise.contract.weights import DirectionWeights
from gatewise.kernels.eager.blocks import is_swept
from gatewise.kernels.eager.masks import NO_MASKS, DirectionMasks
from gatewise.kernels.eager.reading_order import ReadingOrder, carried
from gatewise.kernels.eager.scan import is_variable, over_steps
from gatewise.kernels.eager.staged import StagedSteps
from gatewise.kernels.eager.statement import step_of, step_to_record

OverTokens = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function that computes the product of two matrices, plus a bias unless it is None."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states, of their gradients and of all pointwise operators."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Kept(NamedTuple):
    """The tensors that a forward pass keeps for its backward pass, besides inputs and outputs; all in reading order.

    Reading order is the order of computation: step 0 is the first step of a sequence, or in the reverse direction its
    last step. Values in the padding are undefined. The backward pass does not modify the tensors.

    Attributes:
        sums: The gate sums of all steps [T, B, S*H], in the dtype of x.
        states: Each state other than the hidden state, after every step [T, B, H], in `state_dtype`.
    """

    sums: Tensor
    states: tuple[Tensor, ...]

    @staticmethod
    def specs(problem: Problem) -> tuple[TensorSpec, ...]:
        """Return the shapes and dtypes of the tensors that one direction of one layer keeps."""
        tokens, hidden_size, cell = (problem.time, problem.batch), problem.hidden_size, problem.cell
        state = TensorSpec((*tokens, hidden_size), state_dtype(problem.dtype))
        return (TensorSpec((*tokens, len(cell.sums) * hidden_size), problem.dtype), *[state] * len(cell.states))


class Unrolled(NamedTuple):
    """The result of a forward pass.

    Attributes:
        y: The hidden states in the order of time [T, B, R], zero in the padding.
        h_n: The hidden state after each sequence's last step [B, R].
        states_n: The other states after each sequence's last step [B, H].
        kept: The tensors for the backward pass; None if not requested.
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
    resets: Tensor | None = None,
    masks: DirectionMasks = NO_MASKS,
) -> Unrolled:
    """Run one direction of one layer over a batch of sequences.

    Args:
        cell: The cell.
        x: The input [T, B, I], with any strides; values in the padding are ignored.
        h0: The initial hidden state [B, R].
        states0: The initial values of the other states [B, H], in the order of `Cell.states`.
        weights: The weights of this direction.
        reverse: Whether the direction reads each sequence from its last step to its first.
        lengths: The lengths of the sequences [B], integers in [0, T], on any device, without synchronization; None if
            all sequences have T steps.
        keep: Whether to return the tensors that `adjoint.backward` needs.
        projected: Whether x contains the products of the input with the input weights [T, B, G*H] instead of the input.
        over_tokens: The function that computes matrix products over all tokens; None for `torch.mm` and `torch.addmm`.
        resets: The steps at which episodes begin [T, B], bool: the states before them in reading order are zero; None
            without resets.
        masks: The masks of a regularised cell.

    Returns:
        The output, the final states and the kept tensors. The final states of an empty sequence are its initial states.
    """
    order = ReadingOrder.of(x, lengths, reverse, resets)
    x = order.read(x)
    bias = _Biases.of(cell, weights)
    inputs = _sums_given(x, bias) if projected else _projected(x, weights, bias, over_tokens or in_plain_torch)
    inner = state_dtype(x.dtype)
    rounded = order.initial_state(h0)
    h, states = rounded.to(inner), [order.initial_state(state).to(inner) for state in states0]
    parameters = [parameter.to(inner) for parameter in weights.parameters]
    of_steps = [mask.to(inner) for mask in masks.in_reading_order(order)]
    # A program that was exported without gradients may be called with them.
    recorded = torch.is_grad_enabled() or is_exporting() or torch._C._are_functorch_transforms_active()
    if is_swept(cell) and not recorded and not is_variable(x.shape[0]):
        step: StagedSteps | _Recurrence = StagedSteps(
            step_cell(cell), weights.w_hh, bias.of_hidden, inputs, parameters, of_steps, keep=keep
        )
    else:
        step = _Recurrence(cell, weights, bias, inputs, parameters, of_steps, keep=keep)
    w_hr = None if weights.w_hr is None else weights.w_hr.t()
    everything = keep or lengths is not None
    of_hidden, *of_states = [cell.initial_value(name) for name in ("h", *cell.states)]
    if isinstance(step, _Recurrence) and is_variable(x.shape[0]):
        recurrence = step

        def one(
            before: tuple[Tensor, ...], slices: tuple[Tensor, ...]
        ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            of_input, *masks_of_step = slices
            carries = None if order.carries is None else masks_of_step.pop()
            h, *states = before
            h = carried(h, carries, of_hidden)
            states = [carried(state, carries, value) for state, value in zip(states, of_states, strict=True)]
            sums = recurrence.of_step(of_input, masks.dropped(h.to(x.dtype)))
            h, *states = recurrence.after(sums, (h, *states), masks_of_step)
            # With a projection, which an LSTM alone has, the step itself does not read the hidden state.
            rounded = h.to(x.dtype) if w_hr is None else torch.mm(h.to(x.dtype), w_hr)
            return (h if w_hr is None else rounded.to(inner), *states), (rounded, *(states if everything else ()))

        borders = () if order.carries is None else (order.carries,)
        (_, *states), (outputs, *last) = over_steps(one, (h, *states), (inputs, *of_steps, *borders))
        last = last if everything else [state.unsqueeze(0) for state in states]
    else:
        hs: list[Tensor] = []
        after: list[list[Tensor]] = [[] for _ in states]
        for t, carries in enumerate(order.carried_at(x.shape[0])):
            if carries is not None:
                is_rounded, rounded = h is rounded, carried(rounded, carries, of_hidden)
                h = rounded if is_rounded else carried(h, carries, of_hidden)
                states = [carried(state, carries, value) for state, value in zip(states, of_states, strict=True)]
            h, *states = step(t, masks.dropped(rounded), (h, *states))
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
        order.reordered(order.masked(outputs)),
        order.final_state(outputs, h0),
        tuple(
            order.final_state(history, state0.to(inner)).to(state0.dtype)
            for history, state0 in zip(last, states0, strict=True)
        ),
        Kept(step.kept(), tuple(last)) if keep else None,
    )


class _Biases(NamedTuple):
    """The biases of a direction, divided between input products and recurrent products.

    Attributes:
        of_inputs: The bias that is added to the input products [G*H], or None. For gates with a single sum, it is the
            sum of both biases.
        of_hidden: The bias that is added to the recurrent products [G*H], zero for gates with a single sum; None if all
            gates have a single sum.
    """

    of_inputs: Tensor | None
    of_hidden: Tensor | None

    @classmethod
    def of(cls, cell: Cell, weights: DirectionWeights) -> _Biases:
        """Return the biases of a direction with the given weights."""
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
    """The steps, each computed from the input products and the recurrent product of the step.

    Args:
        cell: The cell.
        weights: The weights of the direction.
        bias: The biases of the direction.
        inputs: The input products of all steps [T, B, G*H]; overwritten if autograd neither records nor may later.
        parameters: The parameters [H], in the dtype of states.
        masks: The masks of steps [T, B, H], in the dtype of states.
        keep: Whether `kept` will be called after the last step.
    """

    def __init__(
        self,
        cell: Cell,
        weights: DirectionWeights,
        bias: _Biases,
        inputs: Tensor,
        parameters: Sequence[Tensor],
        masks: Sequence[Tensor],
        *,
        keep: bool,
    ) -> None:
        self._cell, self._inputs, self._bias = cell, inputs, bias.of_hidden
        self._step = (step_to_record if torch._C._is_tracing() else step_of)(step_cell(cell))
        self._parameters, self._masks = parameters, masks
        self._w_hh, self._apart = weights.w_hh.t(), [gate in cell.apart for gate in cell.gates]
        variable = is_variable(inputs.shape[0])
        self._in_place = not (torch.is_grad_enabled() or is_exporting() or variable)
        # The sums are those in `inputs` afterwards, if they are added in place.
        self._steps = () if variable else inputs.unbind(0)
        self._kept = [] if keep and (cell.apart or not self._in_place) else None

    def __call__(self, t: int, rounded: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the states after step t, as `StagedSteps` does."""
        return self.after(self._sums(t, rounded), states, [mask[t] for mask in self._masks])

    def after(self, sums: Tensor, states: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the states after a step, given its sums and masks."""
        return self._step(sums.to(states[0].dtype), *states, *self._parameters, *masks)

    def _sums(self, t: int, h: Tensor) -> Tensor:
        inputs = self._steps[t]
        if self._in_place and not self._cell.apart:
            return inputs.addmm_(h, self._w_hh)
        sums = self.of_step(inputs, h)
        if self._kept is not None:
            self._kept.append(sums)
        return sums

    def of_step(self, inputs: Tensor, h: Tensor) -> Tensor:
        """Return the sums of a step [B, S*H], given its input products [B, G*H], and keep nothing."""
        if not self._cell.apart:
            return torch.addmm(inputs, h, self._w_hh)
        recurrent = torch.mm(h, self._w_hh) if self._bias is None else torch.addmm(self._bias, h, self._w_hh)
        count = len(self._cell.gates)
        of_input, of_hidden = inputs.chunk(count, -1), recurrent.chunk(count, -1)
        each = list(zip(of_input, of_hidden, self._apart, strict=True))
        parts = [one if apart else one + other for one, other, apart in each]
        return torch.cat([*parts, *(other for _, other, apart in each if apart)], -1)

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
    """Return the product of two matrices, plus a bias unless it is None."""
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _sums_given(products: Tensor, bias: _Biases) -> Tensor:
    # The result is always a new tensor, because the steps add the recurrent products in place.
    if bias.of_inputs is None:
        return products.clone(memory_format=torch.contiguous_format)
    return products + bias.of_inputs


def _stacked(states: list[Tensor], like: Tensor) -> Tensor:
    # Without steps the result is empty, but attached to the initial state in autograd's graph.
    return torch.stack(states) if states else like.unsqueeze(0)[:0].clone()

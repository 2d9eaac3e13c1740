"""The backward pass of one direction of one layer (backpropagation through time).

A loop over time computes the gradients of the gate sums of all steps. Each weight gradient is then one matrix product
over all steps, and so is the gradient of the input. The step's adjoint is linear in the gradients, with coefficients
that depend on the forward pass alone. The coefficients are computed for many steps at once, which leaves two pointwise
operators per step in the loop. Cells that combine hidden units or have several states have a loop of their own, in
`sweep`. `backward` itself is not differentiable: double backward repeats the forward pass under autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import step_cell
from gatewise.cells.cell import Cell
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.adjoint import adjoint_of
from gatewise.derivation.pointwise import coefficient_function, pointwise_of
from gatewise.derivation.stages import stages_of
from gatewise.derivation.trace import before, refusal_of, traced
from gatewise.kernels.eager.blocks import block_of, divided, is_swept
from gatewise.kernels.eager.masks import NO_MASKS, DirectionMasks
from gatewise.kernels.eager.reading_order import ReadingOrder, carried
from gatewise.kernels.eager.sweep import SweepLoop
from gatewise.kernels.eager.unroll import Kept, OverTokens, in_plain_torch, state_dtype

# The coefficients of the adjoint are computed for a block of steps at once, in a buffer that the next block overwrites.
# On a GPU, a block has many steps, so that its operators are few compared to those of the steps. On a CPU, a block fits
# into the cache. For each kind of device: the smallest number of steps of a block, and the number of elements up to
# which a block may have more steps.
_BLOCKS = {"cpu": (8, 1 << 18), "cuda": (32, 1 << 22)}
BLOCK_OPERATORS = 25
"""The number of operators that compute the coefficients of one block."""


class Gradients(NamedTuple):
    """The gradients of one direction, None if not requested; `weights` in the order of `DirectionWeights.tensors`."""

    x: Tensor | None
    h0: Tensor | None
    states0: tuple[Tensor, ...] | None
    weights: tuple[Tensor | None, ...]


def backward(
    cell: Cell,
    x: Tensor,
    h0: Tensor,
    states0: Sequence[Tensor],
    weights: DirectionWeights,
    y: Tensor,
    kept: Kept,
    dy: Tensor | None,
    dh_n: Tensor | None,
    dstates_n: Sequence[Tensor | None],
    *,
    reverse: bool = False,
    lengths: Tensor | None = None,
    needs: Needs = Needs(),  # noqa: B008  an immutable tuple
    projected: bool = False,
    over_tokens: OverTokens | None = None,
    resets: Tensor | None = None,
    masks: DirectionMasks = NO_MASKS,
) -> Gradients:
    """Return the gradients of the inputs and weights of one direction of one layer.

    Args:
        cell: The cell.
        x: The input, as in `unroll.forward`.
        h0: The initial hidden state [B, R].
        states0: The initial values of the other states [B, H].
        weights: The weights of the direction.
        y: The output of `unroll.forward`.
        kept: The kept tensors that `unroll.forward` returned.
        dy: The gradient of y [T, B, R]; values after the end of a sequence are ignored. None for zero.
        dh_n: The gradient of h_n [B, R]; None for zero.
        dstates_n: The gradients of states_n [B, H]; None for zero.
        reverse: Whether the direction reads each sequence from its last step to its first.
        lengths: The lengths of the sequences [B], or None, as in `unroll.forward`.
        needs: The gradients to compute; the products for others are skipped.
        projected: Whether x contains the input products, as in `unroll.forward`; the gradient of x is then the gradient
            of these products.
        over_tokens: The function that computes matrix products over all tokens; None for `torch.mm`.
        resets: The steps at which episodes begin [T, B], or None, as in `unroll.forward`.
        masks: The masks of a regularised cell, as in `unroll.forward`.
    """
    order, over_tokens = ReadingOrder.of(x, lengths, reverse, resets), over_tokens or in_plain_torch
    loop = (SweepLoop if is_swept(cell) else _BackwardLoop)(cell, order, weights, kept, y, h0, masks)
    dh = _hidden_gradient(order, y, dy, dh_n)
    dstates0 = loop.run([order.initial_state(state) for state in states0], dh, dstates_n)
    dsums = loop.of_inputs().to(x.dtype)
    dx = None
    if needs.x:
        dx = dsums.contiguous() if projected else over_tokens(dsums.flatten(0, 1), weights.w_ih, None).view(x.shape)
        dx = order.reordered(dx)
    x = x[..., :0] if projected else x
    return Gradients(
        dx,
        _initial_hidden_gradient(loop, dh_n, h0) if needs.state else None,
        tuple(found.to(given.dtype) for found, given in zip(dstates0, states0, strict=True)) if needs.state else None,
        _weight_gradients(cell, loop, x, states0, dsums, dh, over_tokens)
        if needs.weights
        else (None,) * len(weights.tensors()),
    )


def block_steps(cell: Cell, batch: int, hidden_size: int, device: str) -> int:
    """Return the number of steps whose coefficients are computed at once on a kind of device ("cpu" or "cuda")."""
    if is_swept(cell):
        return block_of(device, batch, hidden_size)
    steps, elements = _BLOCKS.get(device, _BLOCKS["cuda"])
    return max(steps, elements // max(1, _columns(cell) * _rows(cell) * batch * hidden_size))


def backward_workspace(problem: Problem, device: str) -> int:
    """Return the workspace of one direction's backward pass in bytes: gradients, states and a block of coefficients."""
    tokens, cell = problem.time * problem.batch, problem.cell
    block = min(problem.time, block_steps(cell, problem.batch, problem.hidden_size, device)) * problem.batch
    values = 2 * len(traced(cell).operations) if is_swept(cell) else 2 * _columns(cell) * _rows(cell)
    coefficients = values * block * problem.hidden_size
    rows = _rows(cell) * tokens * problem.hidden_size
    state_bytes = state_dtype(problem.dtype).itemsize
    copies = (2 + problem.resets) * tokens * problem.state_size + tokens * problem.input_size
    if state_bytes != problem.element_bytes or cell.apart:
        copies += len(cell.gates) * tokens * problem.hidden_size * (1 + bool(cell.apart))
    return (coefficients + rows) * state_bytes + copies * problem.element_bytes


@functools.lru_cache(maxsize=256)
def _rows(cell: Cell) -> int:
    # A cell that cannot be traced has no such rows; autograd keeps about as much for it. Masks of a regularised cell
    # have rows of coefficients only.
    cell = step_cell(cell)
    reads_hidden = bool(refusal_of(cell)) or traced(cell).reads_hidden
    return len(cell.sums) + len(cell.states) + reads_hidden + len(cell.parameters)


def _columns(cell: Cell) -> int:
    return 1 + len(cell.states)


class _BackwardLoop:
    """The loop over time, from the last step to the first.

    Args:
        cell: The cell.
        order: The order in which the direction reads the sequences.
        weights: The weights of the direction.
        kept: The tensors that the forward pass kept.
        y: The output [T, B, R].
        h0: The initial hidden state [B, R].
        masks: The masks of a regularised cell.

    Attributes:
        rows: The gradients of the sums of each step, of the states before it, and of the parameters through it
            [T, B, rows, H], in the order of `Adjoint.rows`.
        first: The gradients of the recurrent sums of the first step [B, G*H], zero in the rows where it begins an
            episode, because the state before it is not read there; None if there are no steps.
        direct: The gradient of the initial hidden state through element-wise operations, which is added to the gradient
            through the recurrent product [B, H], zero in the same rows; None if the cell has no such operations.
    """

    def __init__(
        self,
        cell: Cell,
        order: ReadingOrder,
        weights: DirectionWeights,
        kept: Kept,
        y: Tensor,
        h0: Tensor,
        masks: DirectionMasks,
    ) -> None:
        self.cell, self.order, self.weights, self.kept, self.masks = cell, order, weights, kept, masks
        self._y, self._h0, self._of_steps = y, h0, masks.in_reading_order(order)
        (time, batch, width), count = kept.sums.shape, len(cell.sums)
        # The last rows are those of masks, which have no gradient.
        self._all_rows = adjoint_of(step_cell(cell)).rows
        rows = self._all_rows[: len(self._all_rows) - len(self._of_steps)]
        self._of_states = [rows.index(before(name)) for name in cell.states]
        self._of_hidden = rows.index(before("h")) if before("h") in rows else None
        self._parameters = [parameter.to(state_dtype(kept.sums.dtype)) for parameter in weights.parameters]
        size = width // count
        self.rows = kept.sums.new_empty(time, batch, len(rows), size, dtype=state_dtype(kept.sums.dtype))
        self.first: Tensor | None = None
        self.direct: Tensor | None = None

    @functools.cached_property
    def hidden(self) -> Tensor:
        """The hidden state before each step, in reading order [T, B, R]."""
        initial = self.order.initial_state(self._h0)
        return self.order.before_steps(self.order.reordered(self._y), initial, self.cell.initial_value("h"))

    def run(self, states0: Sequence[Tensor], dh: Tensor, dstates_n: Sequence[Tensor | None]) -> list[Tensor]:
        """Compute `rows`, and return the gradients of the initial states other than the hidden state.

        Args:
            states0: The initial states other than the hidden state [B, H].
            dh: The gradients of the hidden states through the outputs [T, B, R]. The gradients through the recurrent
                products are added in place.
            dstates_n: The gradients of the final states [B, H]; None for zero.
        """
        (time, batch, count, size), inner = self.rows.shape, self.rows.dtype
        starts = [state.to(inner) for state in states0]
        above = [
            self.rows.new_zeros(batch, size) if given is None else given.to(inner, copy=True) for given in dstates_n
        ]
        carried_at = self.order.carried_at(time)
        block = min(max(1, time), block_steps(self.cell, batch, size, self.rows.device.type))
        memory = [self.rows.new_empty(block, batch, len(self._all_rows), size) for _ in range(1 + len(starts))]
        for stop in range(time, 0, -block):
            start = max(0, stop - block)
            here = [column[: stop - start] for column in memory]
            self._coefficients(starts, start, stop, here)
            here = [column[:, :, :count] for column in here]
            steps = zip(range(start, stop), carried_at[start:stop], *[column.unbind(0) for column in here], strict=True)
            for t, carries, of_hidden, *of_states in reversed(list(steps)):
                total = dh[t] if self.first is None else self._through_product(dh[t], self.first)
                if self.weights.w_hr is not None:
                    total = torch.mm(total, self.weights.w_hr)
                if self.direct is not None:
                    total = total + self.direct
                row = self.rows[t]
                found = torch.mul(total.unsqueeze(-2), of_hidden, out=None if of_states else row)
                for given, column in zip(above, of_states, strict=True):
                    found = torch.addcmul(found, given.unsqueeze(-2), column, out=row)
                above = [carried(row[:, place], carries) for place in self._of_states]
                self.first = carried(self._recurrent(row), carries).to(dh.dtype)
                self.direct = None if self._of_hidden is None else carried(row[:, self._of_hidden], carries)
        return [one.clone() for one in above]

    def _through_product(self, dh: Tensor, first: Tensor) -> Tensor:
        if self.masks.factor is None:
            return dh.addmm_(first, self.weights.w_hh)
        return dh.add_(self.masks.dropped(torch.mm(first, self.weights.w_hh)))

    def of_inputs(self) -> Tensor:
        """Return the gradients of the input products [T, B, G*H] as a view, which matrix products read directly."""
        return self.rows[:, :, : len(self.cell.gates)].flatten(2)

    def of_hidden(self) -> Tensor:
        """Return the gradients of the recurrent sums [T, B, G*H]."""
        return self._recurrent(self.rows)

    def of_parameters(self) -> tuple[Tensor, ...]:
        """Return the gradients of the parameters [H], summed over all steps and sequences."""
        count = len(self._parameters)
        return self.rows[:, :, self.rows.shape[2] - count :].sum((0, 1)).unbind(0) if count else ()

    def _recurrent(self, rows: Tensor) -> Tensor:
        if not self.cell.apart:
            return rows[..., : len(self.cell.gates), :].flatten(-2)
        return torch.cat([rows[..., place, :] for place in self.cell.recurrent_sums], -1)

    def _coefficients(self, starts: Sequence[Tensor], start: int, stop: int, out: Sequence[Tensor]) -> None:
        after = [history[start:stop] for history in self.kept.states]
        earlier = [
            history[start - 1 : stop - 1] if start else torch.cat([state0.unsqueeze(0), here[:-1]])
            for history, here, state0 in zip(self.kept.states, after, starts, strict=True)
        ]
        if self.order.carries is not None:
            values = [self.cell.initial_value(name) for name in self.cell.states]
            earlier = [
                torch.where(self.order.carries[start:stop], history, value)
                for history, value in zip(earlier, values, strict=True)
            ]
        inner = self.rows.dtype
        hidden = None if self._of_hidden is None else self.hidden[start:stop].to(inner)
        sums = self.kept.sums[start:stop].to(inner)
        of_steps = [mask[start:stop].to(inner) for mask in self._of_steps]
        coefficients = coefficient_function(step_cell(self.cell))
        coefficients(sums, hidden, *earlier, *after, *self._parameters, *of_steps, out)
        if self.order.valid is None:
            return
        # In the padding, the gradients of states pass through unchanged, and all other gradients are zero.
        padding = ~self.order.valid[start:stop].unsqueeze(2)
        for column in out:
            column.masked_fill_(padding, 0)
        for place, column in zip(self._of_states, out[1:], strict=True):
            column[:, :, place].masked_fill_(padding.squeeze(2), 1)


def _hidden_gradient(order: ReadingOrder, y: Tensor, dy: Tensor | None, dh_n: Tensor | None) -> Tensor:
    # The result is always a new tensor, because the loop adds the gradients through the recurrent weights in place.
    if dy is None:
        dh = torch.zeros_like(y, memory_format=torch.contiguous_format)
    else:
        dh = order.read(dy)
        dh = dh.clone(memory_format=torch.contiguous_format) if dh is dy else dh
    if dh_n is None or dh.shape[0] == 0:
        return dh
    if order.is_last is None:
        dh[-1] += dh_n
        return dh
    return dh + torch.where(order.is_last, dh_n, 0)


def _initial_hidden_gradient(loop: _BackwardLoop | SweepLoop, dh_n: Tensor | None, h0: Tensor) -> Tensor:
    if loop.first is None:
        return torch.zeros_like(h0) if dh_n is None else dh_n.clone()
    through_steps = loop.masks.dropped(torch.mm(loop.first, loop.weights.w_hh))
    if loop.direct is not None:
        through_steps = (through_steps + loop.direct).to(h0.dtype)
    if loop.order.nonempty is None or dh_n is None:
        return through_steps
    return torch.where(loop.order.nonempty, through_steps, dh_n)


def _weight_gradients(
    cell: Cell,
    loop: _BackwardLoop | SweepLoop,
    x: Tensor,
    states0: Sequence[Tensor],
    dsums: Tensor,
    dh: Tensor,
    over_tokens: OverTokens,
) -> tuple[Tensor, ...]:
    order, weights = loop.order, loop.weights
    of_inputs = dsums.flatten(0, 1)
    of_hidden = loop.of_hidden().to(x.dtype).flatten(0, 1) if cell.apart else of_inputs
    gradients = [
        over_tokens(of_inputs.t(), order.read(x).flatten(0, 1), None),
        over_tokens(of_hidden.t(), loop.masks.dropped(order.masked(loop.hidden)).flatten(0, 1), None),
    ]
    if weights.b_ih is not None:
        of_bias = of_inputs.sum(0)
        gradients += [of_bias, of_hidden.sum(0) if cell.apart else of_bias.clone()]
    if weights.w_hr is not None:
        unprojected = _unprojected(cell, loop, states0).to(x.dtype)
        gradients.append(over_tokens(dh.flatten(0, 1).t(), order.masked(unprojected).flatten(0, 1), None))
    own = zip(loop.of_parameters(), weights.parameters, strict=True)
    return (*gradients, *(gradient.to(parameter.dtype) for gradient, parameter in own))


def _unprojected(cell: Cell, loop: _BackwardLoop | SweepLoop, states0: Sequence[Tensor]) -> Tensor:
    """Return the hidden states of all steps before the projection [T, B, H], computed again."""
    order, kept, masks = loop.order, loop.kept, loop.masks.in_reading_order(loop.order)
    inner = state_dtype(kept.sums.dtype)
    earlier = [
        order.before_steps(history, order.initial_state(state0).to(inner), cell.initial_value(name))
        for history, state0, name in zip(kept.states, states0, cell.states, strict=True)
    ]
    parameters = [parameter.to(inner) for parameter in loop.weights.parameters]
    sums, changing = kept.sums.to(inner), [mask.to(inner) for mask in masks]
    if not isinstance(loop, SweepLoop):
        again = pointwise_of(step_cell(cell)).hidden
        return again(sums, loop.hidden, *earlier, *kept.states, *parameters, *changing)
    stages = stages_of(step_cell(cell), len(masks))
    own, (inputs, recurrent) = stages.once(parameters), divided(cell, sums)
    ahead = stages.ahead(inputs, own)
    return stages.step(inputs, recurrent, [loop.hidden, *earlier], changing, ahead, own)[0]

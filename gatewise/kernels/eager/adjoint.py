"""The backward pass of one direction of one layer: the adjoint of a cell unrolled over time.

The chain through time gives the gradients of the sums of every step; every other gradient is one large product with all
of them. The coefficients of the adjoint depend on the forward pass alone, and are computed for many steps at once, so
that two pointwise operators a step are left in the chain. `backward` is not differentiable and does not need to be.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.adjoint import adjoint_of
from gatewise.derivation.pointwise import coefficients_of, pointwise_of
from gatewise.derivation.trace import before, traced
from gatewise.kernels.eager.reading import Reading
from gatewise.kernels.eager.unroll import Kept, OverTokens, in_plain_torch, state_dtype

# Coefficients of the adjoint are computed for a block of steps at once, in memory that the next block uses again. A GPU
# wants many steps in a block, so that its operators are few beside those of the steps; a CPU wants a block that stays
# in its cache. (At least so many steps; more while they have at most so many elements.)
_BLOCKS = {"cpu": (8, 1 << 18), "cuda": (32, 1 << 22)}
BLOCK_OPERATORS = 25
"""Operators that compute the coefficients of one block."""


class Gradients(NamedTuple):
    """What a backward pass returns; None where not wanted. `weights` in the order of `DirectionWeights.tensors`."""

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
) -> Gradients:
    """Return the gradients of one direction of one layer, from those of its outputs.

    Args:
        cell: As given to `forward`; and so `x`, `h0`, `states0`, `weights`, `reverse` and `lengths`.
        x: As given to `forward`.
        h0: As given to `forward`.
        states0: As given to `forward`.
        weights: As given to `forward`.
        y: As `forward` returned it.
        kept: As `forward` returned it.
        dy: Gradient of y [T, B, R]; values past a row's end are not looked at. None for zero.
        dh_n: Gradient of h_n [B, R]; None for zero.
        dstates_n: Gradient of each of states_n [B, H]; None for zero.
        reverse: As given to `forward`.
        lengths: As given to `forward`.
        needs: Which gradients to compute; products for others are skipped.
        projected: As given to `forward`; the gradient of x is then that of the products.
        over_tokens: Makes the products that go over all tokens; `torch.mm` when None.
    """
    reading, over_tokens = Reading.of(x, lengths, reverse), over_tokens or in_plain_torch
    chain = _Chain(cell, reading, weights, kept, y, h0)
    dh = _hidden_gradient(reading, y, dy, dh_n)
    dstates0 = chain.run([reading.started(state) for state in states0], dh, dstates_n)
    dsums = chain.of_inputs().to(x.dtype)
    dx = None
    if needs.x:
        dx = dsums.contiguous() if projected else over_tokens(dsums.flatten(0, 1), weights.w_ih, None).view(x.shape)
        dx = reading.turned(dx)
    x = x[..., :0] if projected else x
    return Gradients(
        dx,
        _initial_hidden_gradient(chain, dh_n, h0) if needs.state else None,
        tuple(found.to(given.dtype) for found, given in zip(dstates0, states0, strict=True)) if needs.state else None,
        _weight_gradients(cell, chain, x, states0, dsums, dh, over_tokens)
        if needs.weights
        else (None,) * len(weights.tensors()),
    )


def block_steps(cell: Cell, batch: int, hidden_size: int, device: str) -> int:
    """Return how many steps' coefficients a backward pass computes at once on a kind of device ("cpu", "cuda")."""
    steps, elements = _BLOCKS.get(device, _BLOCKS["cuda"])
    return max(steps, elements // max(1, _columns(cell) * _rows(cell) * batch * hidden_size))


def backward_workspace(problem: Problem, device: str) -> int:
    """Return the bytes of workspace of one direction's backward pass: gradients, states and a block of coefficients."""
    tokens, cell = problem.time * problem.batch, problem.cell
    block = min(problem.time, block_steps(cell, problem.batch, problem.hidden_size, device)) * problem.batch
    coefficients = 2 * _columns(cell) * _rows(cell) * block * problem.hidden_size
    rows = _rows(cell) * tokens * problem.hidden_size
    state_bytes = state_dtype(problem.dtype).itemsize
    copies = 2 * tokens * problem.state_size + tokens * problem.input_size
    if state_bytes != problem.element_bytes or cell.apart:
        copies += len(cell.gates) * tokens * problem.hidden_size * (1 + bool(cell.apart))
    return (coefficients + rows) * state_bytes + copies * problem.element_bytes


@functools.lru_cache(maxsize=256)
def _rows(cell: Cell) -> int:
    return len(cell.sums) + len(cell.states) + traced(cell).reads_hidden


def _columns(cell: Cell) -> int:
    return 1 + len(cell.states)


class _Chain:
    """The adjoint of a sequence, from the last step to the first.

    Args:
        cell: The cell.
        reading: The order of reading.
        weights: The weights of the direction.
        kept: What the forward pass kept.
        y: The output [T, B, R].
        h0: The initial hidden state [B, R].

    Attributes:
        rows: The gradients of the sums of every step, then of the states before it [T, B, R, H], as `Adjoint.rows`.
        first: The gradients of the recurrent sums of the first step [B, G*H]; None without steps.
        direct: What reaches the initial hidden state other than through the recurrent product [B, H], or None.
    """

    def __init__(
        self, cell: Cell, reading: Reading, weights: DirectionWeights, kept: Kept, y: Tensor, h0: Tensor
    ) -> None:
        self.cell, self.reading, self.weights, self.kept = cell, reading, weights, kept
        self._y, self._h0 = y, h0
        (time, batch, width), count = kept.sums.shape, len(cell.sums)
        rows = adjoint_of(cell).rows
        self._of_states = [rows.index(before(name)) for name in cell.states]
        self._of_hidden = rows.index(before("h")) if before("h") in rows else None
        size = width // count
        self.rows = kept.sums.new_empty(time, batch, len(rows), size, dtype=state_dtype(kept.sums.dtype))
        self.first: Tensor | None = None
        self.direct: Tensor | None = None

    @functools.cached_property
    def hidden(self) -> Tensor:
        """The hidden state before each step in reading order [T, B, R]."""
        return _previous(self.reading.turned(self._y), self.reading.started(self._h0))

    def run(self, states0: Sequence[Tensor], dh: Tensor, dstates_n: Sequence[Tensor | None]) -> list[Tensor]:
        """Fill `rows`, and return the gradients of the initial states.

        Adds to dh what reaches each hidden state through the recurrent product of the step after it.

        Args:
            states0: The initial states beside the hidden one [B, H].
            dh: The gradient of each hidden state through the outputs [T, B, R].
            dstates_n: The gradients of the final states [B, H], None for zero.
        """
        (time, batch, count, size), inner = self.rows.shape, self.rows.dtype
        starts = [state.to(inner) for state in states0]
        above = [
            self.rows.new_zeros(batch, size) if given is None else given.to(inner, copy=True) for given in dstates_n
        ]
        block = min(max(1, time), block_steps(self.cell, batch, size, self.rows.device.type))
        memory = [self.rows.new_empty(block, batch, count, size) for _ in range(1 + len(starts))]
        for stop in range(time, 0, -block):
            start = max(0, stop - block)
            here = [column[: stop - start] for column in memory]
            self._coefficients(starts, start, stop, here)
            steps = zip(range(start, stop), *[column.unbind(0) for column in here], strict=True)
            for t, of_hidden, *of_states in reversed(list(steps)):
                total = dh[t] if self.first is None else dh[t].addmm_(self.first, self.weights.w_hh)
                if self.weights.w_hr is not None:
                    total = torch.mm(total, self.weights.w_hr)
                if self.direct is not None:
                    total = total + self.direct
                row = self.rows[t]
                found = torch.mul(total.unsqueeze(-2), of_hidden, out=None if of_states else row)
                for given, column in zip(above, of_states, strict=True):
                    found = torch.addcmul(found, given.unsqueeze(-2), column, out=row)
                above = [row[:, place] for place in self._of_states]
                self.first = self._recurrent(row).to(dh.dtype)
                self.direct = None if self._of_hidden is None else row[:, self._of_hidden]
        return [one.clone() for one in above]

    def of_inputs(self) -> Tensor:
        """Return the gradients of the sums of the input [T, B, G*H]: a view, which matrix products take as it is."""
        return self.rows[:, :, : len(self.cell.gates)].flatten(2)

    def of_hidden(self) -> Tensor:
        """Return the gradients of the recurrent sums [T, B, G*H]."""
        return self._recurrent(self.rows)

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
        inner = self.rows.dtype
        hidden = None if self._of_hidden is None else self.hidden[start:stop].to(inner)  # where the adjoint reads it
        coefficients_of(self.cell)(self.kept.sums[start:stop].to(inner), hidden, *earlier, *after, out)
        if self.reading.real is None:
            return
        # A step past a row's end hands the gradients of states on and takes part in nothing else.
        padding = ~self.reading.real[start:stop].unsqueeze(2)
        for column in out:
            column.masked_fill_(padding, 0)
        for place, column in zip(self._of_states, out[1:], strict=True):
            column[:, :, place].masked_fill_(padding.squeeze(2), 1)


def _previous(states: Tensor, initial: Tensor) -> Tensor:
    return torch.cat([initial.unsqueeze(0), states])[: states.shape[0]]


def _hidden_gradient(reading: Reading, y: Tensor, dy: Tensor | None, dh_n: Tensor | None) -> Tensor:
    # Always a new tensor: the chain adds to it what comes through the recurrent weights.
    if dy is None:
        dh = torch.zeros_like(y, memory_format=torch.contiguous_format)
    else:
        dh = reading.read(dy)
        dh = dh.clone(memory_format=torch.contiguous_format) if dh is dy else dh
    if dh_n is None or dh.shape[0] == 0:
        return dh
    if reading.last is None:
        dh[-1] += dh_n
        return dh
    return dh + torch.where(reading.last, dh_n, 0)


def _initial_hidden_gradient(chain: _Chain, dh_n: Tensor | None, h0: Tensor) -> Tensor:
    if chain.first is None:
        return torch.zeros_like(h0) if dh_n is None else dh_n.clone()
    through_steps = torch.mm(chain.first, chain.weights.w_hh)
    if chain.direct is not None:
        through_steps = (through_steps + chain.direct).to(h0.dtype)
    if chain.reading.alive is None or dh_n is None:
        return through_steps
    return torch.where(chain.reading.alive, through_steps, dh_n)


def _weight_gradients(
    cell: Cell,
    chain: _Chain,
    x: Tensor,
    states0: Sequence[Tensor],
    dsums: Tensor,
    dh: Tensor,
    over_tokens: OverTokens,
) -> tuple[Tensor, ...]:
    reading, weights, kept = chain.reading, chain.weights, chain.kept
    of_inputs = dsums.flatten(0, 1)
    of_hidden = chain.of_hidden().to(x.dtype).flatten(0, 1) if cell.apart else of_inputs
    gradients = [
        over_tokens(of_inputs.t(), reading.read(x).flatten(0, 1), None),
        over_tokens(of_hidden.t(), reading.masked(chain.hidden).flatten(0, 1), None),
    ]
    if weights.b_ih is not None:
        of_bias = of_inputs.sum(0)
        gradients += [of_bias, of_hidden.sum(0) if cell.apart else of_bias.clone()]
    if weights.w_hr is not None:
        inner = chain.rows.dtype
        earlier = [
            _previous(history, reading.started(state0).to(inner))
            for history, state0 in zip(kept.states, states0, strict=True)
        ]
        again = pointwise_of(cell).hidden
        unprojected = again(kept.sums.to(inner), chain.hidden, *earlier, *kept.states).to(x.dtype)
        gradients.append(over_tokens(dh.flatten(0, 1).t(), reading.masked(unprojected).flatten(0, 1), None))
    return tuple(gradients)

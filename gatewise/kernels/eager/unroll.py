"""One direction of one layer: a cell unrolled over time, and the adjoint of the whole sequence.

Forward: all input projections in one matrix product, then one small product and a few pointwise operators a step.
Backward: the chain through time gives the gradients of the sums of every step; every other gradient is one large
product with all of them.

`forward` is made of differentiable operators only: run while autograd records, it has right derivatives of every order.
(While autograd does not record, each step's product is added to its projected input where that lies, which saves a copy
of the sums and one device kernel a step.) `backward` is not differentiable and does not need to be.

Everything pointwise is computed in float32 for half types, otherwise in the dtype itself. A state is a sum over time:
kept in a half type it would lose increments smaller than its last bit, and activations rounded one by one would add
about six roundings a step. With float32 in between, a step in a half type rounds the sums and the hidden state that the
matrix product reads, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells.cell import Cell
from gatewise.contract.kernel import TensorSpec
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs
from gatewise.contract.weights import DirectionWeights
from gatewise.derivation.adjoint import adjoint_of
from gatewise.derivation.pointwise import coefficients_of, pointwise_of
from gatewise.derivation.trace import before, traced
from gatewise.kernels.eager.reading import Reading

OverTokens = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The product of two matrices, plus a bias where there is one."""

# Coefficients of the adjoint are computed for a block of steps at once, in memory that the next block uses again. A GPU
# wants many steps in a block, so that its operators are few beside those of the steps; a CPU wants a block that stays
# in its cache. (At least so many steps; more while they have at most so many elements.)
_BLOCKS = {"cpu": (8, 1 << 18), "cuda": (32, 1 << 22)}
BLOCK_OPERATORS = 25
"""Operators that compute the coefficients of one block."""


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


class Gradients(NamedTuple):
    """What a backward pass returns; None where not wanted. `weights` in the order of `DirectionWeights.tensors`."""

    x: Tensor | None
    h0: Tensor | None
    states0: tuple[Tensor, ...] | None
    weights: tuple[Tensor | None, ...]


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
    reading, pointwise = Reading.of(x, lengths, reverse), pointwise_of(traced(cell)).step
    x = _read(reading, x)
    bias = _Biases.of(cell, weights)
    inputs = _sums_given(x, bias) if projected else _projected(x, weights, bias, over_tokens or _in_plain_torch)
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
    reading, over_tokens = Reading.of(x, lengths, reverse), over_tokens or _in_plain_torch
    before_steps = _previous(reading.turned(y), reading.started(h0))
    chain = _Chain(cell, reading, weights, kept, before_steps)
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
        places = [float(gate in cell.apart) for gate in cell.gates]
        apart = weights.b_hh.new_tensor(places).repeat_interleave(weights.b_hh.shape[0] // len(cell.gates))
        return cls(weights.b_ih + weights.b_hh * (1 - apart), weights.b_hh * apart)


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
        self._w_hh = weights.w_hh.t()
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
        apart = [gate in self._cell.apart for gate in self._cell.gates]
        parts = [one if alone else one + other for one, other, alone in zip(of_input, of_hidden, apart, strict=True)]
        found = torch.cat([*parts, *(other for other, alone in zip(of_hidden, apart, strict=True) if alone)], -1)
        if self._kept is not None:
            self._kept.append(found)
        return found

    def kept(self) -> Tensor:
        """Return the sums of all steps [T, B, S*H]."""
        if self._kept is None:
            return self._inputs
        batch, size = self._inputs.shape[1], self._inputs.shape[2] // len(self._cell.gates)
        return _stacked(self._kept, self._inputs.new_zeros(batch, len(self._cell.sums) * size))


class _Chain:
    """The adjoint of a sequence, from the last step to the first.

    Args:
        cell: The cell.
        reading: The order of reading.
        weights: The weights of the direction.
        kept: What the forward pass kept.
        hidden: The hidden state before each step in reading order [T, B, R].

    Attributes:
        rows: The gradients of the sums of every step, then of the states before it [T, B, R, H], as `Adjoint.rows`.
        first: The gradients of the recurrent sums of the first step [B, G*H]; None without steps.
        direct: What reaches the initial hidden state other than through the recurrent product [B, H], or None.
    """

    def __init__(self, cell: Cell, reading: Reading, weights: DirectionWeights, kept: Kept, hidden: Tensor) -> None:
        self.cell, self.step, self.reading, self.weights, self.kept = cell, traced(cell), reading, weights, kept
        self.hidden = hidden
        (time, batch, width), count = kept.sums.shape, len(cell.sums)
        rows = adjoint_of(self.step).rows
        self._of_states = [rows.index(before(name)) for name in cell.states]
        self._of_hidden = rows.index(before("h")) if self.step.reads_hidden else None
        size = width // count
        self.rows = kept.sums.new_empty(time, batch, len(rows), size, dtype=state_dtype(kept.sums.dtype))
        self.first: Tensor | None = None
        self.direct: Tensor | None = None

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
        sums, hidden = (tensor[start:stop].to(self.rows.dtype) for tensor in (self.kept.sums, self.hidden))
        coefficients_of(self.step)(sums, hidden, *earlier, *after, out)
        if self.reading.real is None:
            return
        # A step past a row's end hands the gradients of states on and takes part in nothing else.
        padding = ~self.reading.real[start:stop].unsqueeze(2)
        for column in out:
            column.masked_fill_(padding, 0)
        for place, column in zip(self._of_states, out[1:], strict=True):
            column[:, :, place].masked_fill_(padding.squeeze(2), 1)


def _read(reading: Reading, sequence: Tensor) -> Tensor:
    return reading.turned(reading.masked(sequence))


def _projected(x: Tensor, weights: DirectionWeights, bias: _Biases, over_tokens: OverTokens) -> Tensor:
    product = over_tokens(x.flatten(0, 1), weights.w_ih.t(), bias.of_inputs)
    return product.view(*x.shape[:2], product.shape[1])


def _in_plain_torch(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _sums_given(products: Tensor, bias: _Biases) -> Tensor:
    # Always a new tensor: the steps add to it what comes through the recurrent weights.
    if bias.of_inputs is None:
        return products.clone(memory_format=torch.contiguous_format)
    return products + bias.of_inputs


def _stacked(states: list[Tensor], like: Tensor) -> Tensor:
    # Without steps: nothing, but attached to the initial state, so that autograd can ask for its derivative.
    return torch.stack(states) if states else like.unsqueeze(0)[:0].clone()


def _previous(states: Tensor, initial: Tensor) -> Tensor:
    return torch.cat([initial.unsqueeze(0), states])[: states.shape[0]]


def _hidden_gradient(reading: Reading, y: Tensor, dy: Tensor | None, dh_n: Tensor | None) -> Tensor:
    # Always a new tensor: the chain adds to it what comes through the recurrent weights.
    if dy is None:
        dh = torch.zeros_like(y, memory_format=torch.contiguous_format)
    else:
        dh = _read(reading, dy)
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
        over_tokens(of_inputs.t(), _read(reading, x).flatten(0, 1), None),
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
        again = pointwise_of(chain.step).hidden
        unprojected = again(kept.sums.to(inner), chain.hidden, *earlier, *kept.states).to(x.dtype)
        gradients.append(over_tokens(dh.flatten(0, 1).t(), reading.masked(unprojected).flatten(0, 1), None))
    return tuple(gradients)

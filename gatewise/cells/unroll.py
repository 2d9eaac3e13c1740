"""One direction of one layer: the LSTM cell unrolled over time, and the adjoint of the whole sequence.

Forward: all input projections in one matrix product, then one small product and a few pointwise operators a step.
Backward: the chain through time gives dz of every step; every other gradient is one large product with all of dz.

`forward` is made of differentiable operators only: run while autograd records, it has right derivatives of every order.
(While autograd does not record, each step's product is added to its projected input where that lies, which saves a copy
of z and one device kernel a step.) `backward` is not differentiable and does not need to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gatewise.cells import lstm
from gatewise.cells.reading import Reading
from gatewise.contract.kernel import TensorSpec
from gatewise.contract.problem import Problem
from gatewise.contract.saved import Needs
from gatewise.contract.weights import DirectionWeights

OverTokens = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The product of two matrices, plus a bias where there is one."""

# Coefficients of the adjoint are computed for a block of steps at once, in memory that the next block uses again. A GPU
# wants many steps in a block, so that its operators are few beside those of the steps; a CPU wants a block that stays
# in its cache. (At least so many steps; more while they have at most so many elements.)
_BLOCKS = {"cpu": (8, 1 << 18), "cuda": (32, 1 << 22)}
BLOCK_OPERATORS = 25
"""Operators that compute the coefficients of one block."""


class Kept(NamedTuple):
    """What a forward pass keeps for its backward pass, besides inputs and outputs; both in reading order.

    Reading order is the order of computation: step 0 is a row's first step, or its own last one in the reverse
    direction. Entries past a row's end are meaningless. Both tensors live until the backward pass is done; it does not
    change them.

    Attributes:
        z: Pre-activations of the four gates [T, B, 4H], in the dtype of x.
        c: Cell states after each step [T, B, H], in `lstm.state_dtype`.
    """

    z: Tensor
    c: Tensor

    @staticmethod
    def specs(problem: Problem) -> tuple[TensorSpec, TensorSpec]:
        """Return shapes and dtypes of what one direction of one layer keeps."""
        tokens, hidden_size = (problem.time, problem.batch), problem.hidden_size
        return (
            TensorSpec((*tokens, 4 * hidden_size), problem.dtype),
            TensorSpec((*tokens, hidden_size), lstm.state_dtype(problem.dtype)),
        )


class Unrolled(NamedTuple):
    """What a forward pass returns.

    Attributes:
        y: Hidden states in the order of time [T, B, R], zero past each row's end.
        h_n: Hidden state after each row's last step [B, R].
        c_n: Cell state after each row's last step [B, H].
        kept: For the backward pass; None when not wanted.
    """

    y: Tensor
    h_n: Tensor
    c_n: Tensor
    kept: Kept | None


class Gradients(NamedTuple):
    """What a backward pass returns; None where not wanted. `weights` in the order of `DirectionWeights.tensors`."""

    x: Tensor | None
    h0: Tensor | None
    c0: Tensor | None
    weights: tuple[Tensor | None, ...]


def forward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
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
        x: Input [T, B, I], any strides; values past a row's end are not looked at.
        h0: Initial hidden state [B, R].
        c0: Initial cell state [B, H].
        weights: Of this direction.
        reverse: Whether each row is read from its own last step to its first.
        lengths: Steps of each row [B], integers in [0, T], any device; None when every row has T. Never waited for.
        keep: Whether to return what `backward` needs.
        projected: Whether x holds the products of the input with the input weights already [T, B, 4H].
        over_tokens: Makes the product that goes over all tokens; `torch.mm` and `torch.addmm` when None.

    Returns:
        Output, final states and what was kept. A row of length 0 hands its initial state through.
    """
    reading = Reading.of(x, lengths, reverse)
    x = _read(reading, x)
    sums = _sums_given(x, weights) if projected else _projected(x, weights, over_tokens or _in_plain_torch)
    h, c = reading.started(h0), reading.started(c0).to(lstm.state_dtype(x.dtype))
    w_hh, w_hr = weights.w_hh.t(), None if weights.w_hr is None else weights.w_hr.t()
    own = not torch.is_grad_enabled()
    hs, cs = [], []
    for z in sums.unbind(0):
        z = z.addmm_(h, w_hh) if own else torch.addmm(z, h, w_hh)
        m, c = lstm.step(z, c)
        h = m.to(x.dtype) if w_hr is None else torch.mm(m.to(x.dtype), w_hr)
        hs.append(h)
        if keep or lengths is not None:
            cs.append(c)
    states = _stacked(hs, h0)
    cells = _stacked(cs, c) if keep or lengths is not None else c.unsqueeze(0)
    return Unrolled(
        reading.turned(reading.masked(states)),
        reading.finished(states, h0),
        reading.finished(cells, c0.to(c.dtype)).to(c0.dtype),
        Kept(sums, cells) if keep else None,
    )


def backward(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: DirectionWeights,
    y: Tensor,
    kept: Kept,
    dy: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    *,
    reverse: bool = False,
    lengths: Tensor | None = None,
    needs: Needs = Needs(),  # noqa: B008  an immutable tuple
    projected: bool = False,
    over_tokens: OverTokens | None = None,
) -> Gradients:
    """Return the gradients of one direction of one layer, from those of its outputs.

    Args:
        x: As given to `forward`; and so `h0`, `c0`, `weights`, `reverse` and `lengths`.
        h0: As given to `forward`.
        c0: As given to `forward`.
        weights: As given to `forward`.
        y: As `forward` returned it.
        kept: As `forward` returned it.
        dy: Gradient of y [T, B, R]; values past a row's end are not looked at. None for zero.
        dh_n: Gradient of h_n [B, R]; None for zero.
        dc_n: Gradient of c_n [B, H]; None for zero.
        reverse: As given to `forward`.
        lengths: As given to `forward`.
        needs: Which gradients to compute; products for others are skipped.
        projected: As given to `forward`; the gradient of x is then that of the products.
        over_tokens: Makes the products that go over all tokens; `torch.mm` when None.
    """
    reading = Reading.of(x, lengths, reverse)
    dh = _hidden_gradient(reading, y, dy, dh_n)
    rows, dc0 = _chain(reading, weights, kept, reading.started(c0).to(kept.c.dtype), dh, dc_n)
    # [T, B, 5, H] -> [T, B, 4H], a view whose rows lie 5H apart, which matrix products take as it is.
    dz = rows[:, :, : lstm.CELL].flatten(2).to(x.dtype)
    over_tokens = over_tokens or _in_plain_torch
    dx = None
    if needs.x:
        dx = dz.contiguous() if projected else over_tokens(dz.flatten(0, 1), weights.w_ih, None).view(x.shape)
        dx = reading.turned(dx)
    x = x[..., :0] if projected else x
    return Gradients(
        dx,
        _initial_hidden_gradient(reading, weights, dz, dh_n, h0) if needs.state else None,
        dc0.to(c0.dtype) if needs.state else None,
        _weight_gradients(reading, x, h0, weights, y, kept, dz, dh, over_tokens)
        if needs.weights
        else (None,) * len(weights.tensors()),
    )


def block_steps(batch: int, hidden_size: int, device: str) -> int:
    """Return how many steps' coefficients a backward pass computes at once on a kind of device ("cpu", "cuda")."""
    steps, elements = _BLOCKS.get(device, _BLOCKS["cuda"])
    return max(steps, elements // max(1, 2 * (lstm.CELL + 1) * batch * hidden_size))


def backward_workspace(problem: Problem, device: str) -> int:
    """Return the bytes of scratch memory of one direction's backward pass: rows, dz, dh, h, a block of coefficients."""
    tokens = problem.time * problem.batch
    block = min(problem.time, block_steps(problem.batch, problem.hidden_size, device)) * problem.batch
    coefficients = 4 * (lstm.CELL + 1) * block * problem.hidden_size
    rows = (lstm.CELL + 1) * tokens * problem.hidden_size
    state_bytes = lstm.state_dtype(problem.dtype).itemsize
    copies = 2 * tokens * problem.state_size + tokens * problem.input_size
    if state_bytes != problem.element_bytes:
        copies += 4 * tokens * problem.hidden_size
    return (coefficients + rows) * state_bytes + copies * problem.element_bytes


def _read(reading: Reading, sequence: Tensor) -> Tensor:
    return reading.turned(reading.masked(sequence))


def _projected(x: Tensor, weights: DirectionWeights, over_tokens: OverTokens) -> Tensor:
    bias = None if weights.b_ih is None or weights.b_hh is None else weights.b_ih + weights.b_hh
    product = over_tokens(x.flatten(0, 1), weights.w_ih.t(), bias)
    return product.view(*x.shape[:2], product.shape[1])


def _in_plain_torch(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def _sums_given(products: Tensor, weights: DirectionWeights) -> Tensor:
    # Always a new tensor: the steps add to it what comes through the recurrent weights.
    if weights.b_ih is None or weights.b_hh is None:
        return products.clone(memory_format=torch.contiguous_format)
    return products + (weights.b_ih + weights.b_hh)


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


def _chain(
    reading: Reading, weights: DirectionWeights, kept: Kept, c0: Tensor, dh: Tensor, dc_n: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the adjoint from the last step to the first.

    Adds to dh what reaches each hidden state through the step after it.

    Returns:
        Rows of `lstm.adjoint` for every step [T, B, 5, H], and the gradient of the initial cell state [B, H].
    """
    time, batch, hidden_size = kept.c.shape
    rows = kept.c.new_empty(time, batch, lstm.CELL + 1, hidden_size)
    dc = torch.zeros_like(c0) if dc_n is None else dc_n.to(c0.dtype, copy=True)
    block = min(max(1, time), block_steps(batch, hidden_size, kept.c.device.type))
    memory = lstm.Coefficients(rows.new_empty(block, *rows.shape[1:]), rows.new_empty(block, *rows.shape[1:]))
    dz = None
    for stop in range(time, 0, -block):
        start = max(0, stop - block)
        here = lstm.Coefficients(*(tensor[: stop - start] for tensor in memory))
        _coefficients(reading, kept, c0, start, stop, here)
        steps = zip(range(start, stop), here.from_hidden.unbind(0), here.from_cell.unbind(0), strict=True)
        for t, from_hidden, from_cell in reversed(list(steps)):
            dh_t = dh[t] if dz is None else dh[t].addmm_(dz, weights.w_hh)
            dm = dh_t if weights.w_hr is None else torch.mm(dh_t, weights.w_hr)
            before = lstm.adjoint(dm, dc, lstm.Coefficients(from_hidden, from_cell), out=rows[t])
            dz, dc = before[:, : lstm.CELL].flatten(1).to(dh.dtype), before[:, lstm.CELL]
    return rows, dc.clone()


def _coefficients(reading: Reading, kept: Kept, c0: Tensor, start: int, stop: int, out: lstm.Coefficients) -> None:
    c = kept.c[start:stop]
    before = kept.c[start - 1 : stop - 1] if start else torch.cat([c0.unsqueeze(0), c[:-1]])
    lstm.coefficients(kept.z[start:stop], before, c, out)
    if reading.real is not None:
        # A step past a row's end hands dc on and takes part in nothing else.
        padding = ~reading.real[start:stop].unsqueeze(2)
        out.from_hidden.masked_fill_(padding, 0)
        out.from_cell.masked_fill_(padding, 0)
        out.from_cell[:, :, lstm.CELL].masked_fill_(padding.squeeze(2), 1)


def _initial_hidden_gradient(
    reading: Reading, weights: DirectionWeights, dz: Tensor, dh_n: Tensor | None, h0: Tensor
) -> Tensor:
    if dz.shape[0] == 0:
        return torch.zeros_like(h0) if dh_n is None else dh_n.clone()
    through_steps = torch.mm(dz[0], weights.w_hh)
    if reading.alive is None or dh_n is None:
        return through_steps
    return torch.where(reading.alive, through_steps, dh_n)


def _weight_gradients(
    reading: Reading,
    x: Tensor,
    h0: Tensor,
    weights: DirectionWeights,
    y: Tensor,
    kept: Kept,
    dz: Tensor,
    dh: Tensor,
    over_tokens: OverTokens,
) -> tuple[Tensor, ...]:
    of_gates = dz.flatten(0, 1)
    h = _previous(reading.turned(y), reading.started(h0))
    gradients = [
        over_tokens(of_gates.t(), _read(reading, x).flatten(0, 1), None),
        over_tokens(of_gates.t(), reading.masked(h).flatten(0, 1), None),
    ]
    if weights.b_ih is not None:
        of_bias = of_gates.sum(0)
        gradients += [of_bias, of_bias.clone()]
    if weights.w_hr is not None:
        m = lstm.hidden(kept.z, kept.c).to(x.dtype)
        gradients.append(over_tokens(dh.flatten(0, 1).t(), reading.masked(m).flatten(0, 1), None))
    return tuple(gradients)

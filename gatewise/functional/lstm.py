"""The differentiable call."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells import LSTM, Cell
from gatewise.contract.errors import KernelRefused, sentence
from gatewise.contract.problem import NORMAL
from gatewise.contract.saved import Inputs
from gatewise.functional._autograd import apply, in_plain_torch
from gatewise.functional._ops import traced_lstm
from gatewise.functional.arguments import check_tensors
from gatewise.functional.explicit import Output, State, forward_on, record
from gatewise.functional.lengths import lie_beside, without_sync
from gatewise.functional.plan import Plan, plan, probed
from gatewise.functional.signature import NestedWeights, flattened
from gatewise.functional.validate import prepare, with_masks, zeros
from gatewise.selection import AUTO, REFERENCE, choose, preference

_NOTHING = contextlib.nullcontext()


def lstm(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    weights: NestedWeights | Sequence[Tensor],
    *,
    lengths: Tensor | Sequence[int] | None = None,
    batch_sizes: Tensor | None = None,
    bidirectional: bool = False,
    dropout: float = 0.0,
    kernel: str = AUTO,
    memory: str = NORMAL,
) -> Output:
    """Compute an LSTM, differentiable with respect to x, state and weights, any number of times.

    The equations and arguments are those of `gatewise.functional.forward`. Under autocast, x, state and weights are
    converted to autocast's dtype, which is the dtype of the result (float64 stays). Under `torch.compile` and
    `torch.export` the call is one operator of the graph, and the kernel is chosen when it is compiled. Meta tensors
    give meta tensors: shapes without a computation.

    Args:
        x: Input [T, B, I], any strides; [N, I] with `batch_sizes`.
        state: Initial (h0 [L*D, B, R], c0 [L*D, B, H]); None for zeros.
        weights: As `torch.nn.LSTM.all_weights`, or all tensors in one flat sequence.
        lengths: Integers [B] in [0, T]; None when every sequence has T steps.
        batch_sizes: Sequences alive at each step [T] of a packed batch, int64 on the CPU; None unless x is packed.
        bidirectional: Whether every layer has a reverse direction.
        dropout: Probability of dropping an output between layers, applied as given; 0 for none.
        kernel: A name from `gatewise.kernel_names()`, or "auto".
        memory: "normal" keeps for the backward pass whatever makes it fastest. "lean" keeps the cell states and nothing
            that can be computed again from them, x and the outputs; see the page on memory.

    Returns:
        `Output(y, State(h, c))`: y [T, B, D*R] ([N, D*R] when packed), final state as the initial one.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        ArgumentError: An argument is not of the kind it must be, or `dropout` or `memory` is not what it can be.
        KernelRefused: The kernel that was named cannot run this call; the message is the decision.

    Example:
        >>> import torch
        >>> from gatewise import functional
        >>> module = torch.nn.LSTM(4, 8)
        >>> y, (h_n, c_n) = functional.lstm(torch.randn(5, 2, 4), None, module.all_weights)
    """
    flat = flattened(weights)
    if not torch.compiler.is_compiling():
        check_tensors(x, state, flat)
    return call(
        x,
        state,
        flat,
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=bidirectional,
        dropout=dropout,
        kernel=kernel,
        memory=memory,
    )


def call(
    x: Tensor,
    state: tuple[Tensor, Tensor] | None,
    flat: tuple[Tensor, ...],
    *,
    lengths: Tensor | Sequence[int] | None,
    batch_sizes: Tensor | None,
    bidirectional: bool,
    dropout: float,
    kernel: str,
    memory: str,
    cell: Cell = LSTM(),  # noqa: B008  an immutable statement
) -> Output:
    """Do what `lstm` does for any shipped cell, where x, state and the weights are known to be tensors.

    Args:
        x: As in `lstm`; and so all others but `flat` and `cell`.
        state: The initial hidden state and the other states side by side [L*D, B, S*H]; None for zeros.
        flat: The weights in torch's flat order.
        lengths: As in `lstm`.
        batch_sizes: As in `lstm`.
        bidirectional: As in `lstm`.
        dropout: As in `lstm`.
        kernel: As in `lstm`.
        memory: As in `lstm`.
        cell: The cell.
    """
    if x.is_meta or torch.compiler.is_compiling():
        if not x.is_meta:
            x, state, flat = _as_autocast(x, state, flat)
        options = lengths, batch_sizes, bidirectional, dropout, kernel, memory, cell
        return Output(*traced_lstm(x, state, flat, *options))
    autocast = torch._C._is_any_autocast_enabled()
    if autocast:
        x, state, flat = _as_autocast(x, state, flat)
    grad_enabled = torch.is_grad_enabled()
    needs_grad = grad_enabled and (
        x.requires_grad
        or any(weight.requires_grad for weight in flat)
        or (state is not None and (state[0].requires_grad or state[1].requires_grad))
    )
    transformed = torch._C._are_functorch_transforms_active()
    asked = False  # whether autograd could record the call by itself
    beside = lengths if lengths is not None and lie_beside(lengths, x) else None
    if batch_sizes is None and not transformed and beside is lengths:
        way = plan(x, state, flat, bidirectional, dropout, needs_grad, kernel, memory, cell, beside is not None)
        problem, recorded = way.problem, way.recorded
        h0, c0 = zeros(problem, x) if state is None else state
        if beside is not None:
            beside, h0 = without_sync(beside, problem.time, h0)
        inputs = Inputs(x, h0, c0, flat, beside)
        if recorded is not None and not autocast:
            found, asked = recorded(problem, inputs), True
            if found is not None:
                return Output(found[0], State(found[1], found[2]))
        if autocast:
            way = way._replace(straight=None)
    else:
        problem, inputs = prepare(
            x,
            state,
            flat,
            lengths=lengths,
            batch_sizes=batch_sizes,
            bidirectional=bidirectional,
            dropout=dropout,
            needs_grad=needs_grad,
            memory=memory,
            cell=cell,
        )
        if transformed:
            _check_transformable(kernel)
            y, h_n, c_n, _ = in_plain_torch(problem, with_masks(problem, inputs))
            return Output(y, State(h_n, c_n))
        way = Plan(problem, choose(problem, probed(x.device), kernel).chosen or "")
    if needs_grad:
        found = None if asked or lengths is not None else record(way.kernel, problem, inputs)
        if found is None:
            if problem.dropout:
                inputs = with_masks(problem, inputs)
            # The tensors travel as arguments too, so that autograd sees them.
            found = apply(way, inputs, inputs.x, inputs.h0, inputs.c0, *flat)
    else:
        with torch.no_grad() if grad_enabled else _NOTHING:
            inputs = with_masks(problem, inputs)
            straight = way.straight
            found = forward_on(way.kernel, problem, inputs) if straight is None else straight.forward(problem, inputs)
    return Output(found[0], State(found[1], found[2]))


def _as_autocast(
    x: Tensor, state: tuple[Tensor, Tensor] | None, flat: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, Tensor] | None, tuple[Tensor, ...]]:
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x, state, flat
    dtype = torch.get_autocast_dtype(x.device.type)
    state = None if state is None else (state[0].to(dtype), state[1].to(dtype))
    return x.to(dtype), state, tuple(weight.to(dtype) for weight in flat)


def _check_transformable(kernel: str) -> None:
    wanted = preference(kernel).kernel
    if wanted not in (AUTO, REFERENCE.name):
        expectation = f"{AUTO!r} or {REFERENCE.name!r} inside torch.func.grad, vmap and the like"
        raise KernelRefused(sentence("kernel", expectation, repr(wanted), "They see plain PyTorch operators only."))

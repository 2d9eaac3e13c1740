"""The differentiable call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.contract.errors import KernelRefused, sentence
from gatewise.functional._autograd import LSTMFunction, in_plain_torch
from gatewise.functional._ops import traced_lstm
from gatewise.functional.explicit import Output, State, forward_on, probed, record
from gatewise.functional.signature import NestedWeights, flattened
from gatewise.functional.validate import prepare, with_masks
from gatewise.selection import AUTO, REFERENCE, choose, preference


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

    Returns:
        `Output(y, State(h, c))`: y [T, B, D*R] ([N, D*R] when packed), final state as the initial one.

    Raises:
        ShapeError: A rank, size or length does not fit.
        DtypeError: A dtype does not fit.
        DeviceError: Tensors are on devices that do not go together.
        KernelRefused: The kernel that was named cannot run this call; the message is the decision.

    Example:
        >>> import torch
        >>> from gatewise import functional
        >>> module = torch.nn.LSTM(4, 8)
        >>> y, (h_n, c_n) = functional.lstm(torch.randn(5, 2, 4), None, module.all_weights)
    """
    flat = flattened(weights)
    on_meta = x.device.type == "meta"
    autocast = not on_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    if autocast:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, flat = x.to(dtype), tuple(weight.to(dtype) for weight in flat)
        state = None if state is None else (state[0].to(dtype), state[1].to(dtype))
    if on_meta or torch.compiler.is_compiling():
        return Output(*traced_lstm(x, state, flat, lengths, batch_sizes, bidirectional, dropout, kernel))
    needs_grad = torch.is_grad_enabled() and (
        x.requires_grad
        or any(weight.requires_grad for weight in flat)
        or (state is not None and (state[0].requires_grad or state[1].requires_grad))
    )
    problem, inputs = prepare(
        x,
        state,
        flat,
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=bidirectional,
        dropout=dropout,
        needs_grad=needs_grad,
    )
    if torch._C._are_functorch_transforms_active():
        _check_transformable(kernel)
        y, h_n, c_n, _ = in_plain_torch(problem, with_masks(problem, inputs))
        return Output(y, State(h_n, c_n))
    chosen = choose(problem, probed(x.device), kernel).chosen or ""
    if not needs_grad:
        with torch.no_grad():
            y, h_n, c_n, _ = forward_on(chosen, problem, with_masks(problem, inputs))
        return Output(y, State(h_n, c_n))
    recorded = record(chosen, problem, inputs)
    if recorded is not None:
        return Output(recorded.y, State(recorded.h_n, recorded.c_n))
    inputs = with_masks(problem, inputs)
    # The tensors travel as arguments, so that autograd sees them; what is left of the inputs has no gradient.
    y, h_n, c_n = LSTMFunction.apply(problem, chosen, inputs[4:], inputs.x, inputs.h0, inputs.c0, *flat)  # type: ignore[misc]
    return Output(y, State(h_n, c_n))


def _check_transformable(kernel: str) -> None:
    wanted = preference(kernel).kernel
    if wanted not in (AUTO, REFERENCE.name):
        expectation = f"{AUTO!r} or {REFERENCE.name!r} inside torch.func.grad, vmap and the like"
        raise KernelRefused(sentence("kernel", expectation, repr(wanted), "They see plain PyTorch operators only."))

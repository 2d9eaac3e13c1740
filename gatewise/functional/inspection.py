"""The decision of a call that is about to be made, from the call's own tensors and settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatewise.cells import LSTM, Cell
from gatewise.contract.decision import Decision
from gatewise.contract.problem import NORMAL
from gatewise.functional.plan import probed
from gatewise.functional.signature import NestedWeights, flattened
from gatewise.functional.validate import prepare
from gatewise.selection import AUTO, decide
from gatewise.selection.evidence import kernels_among
from gatewise.selection.pytorch import decide_as_pytorch

__all__ = ["decision_of", "kernels_among"]


def decision_of(
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
    by_pytorch: bool = False,
    cell: Cell = LSTM(),  # noqa: B008  an immutable statement
) -> Decision:
    """Return the decision that `gatewise.functional.lstm` would make for these arguments here and now.

    Autocast, grad mode, `use_kernel` and the environment count as they do in the call. Nothing is computed.

    Args:
        x: As in the call; so are all others but the last.
        state: Initial state, or None.
        weights: All weights.
        lengths: Lengths, or None.
        batch_sizes: Of a packed batch, or None.
        bidirectional: Whether every layer has a reverse direction.
        dropout: Between layers, as applied.
        kernel: A name, or "auto".
        memory: "normal" or "lean".
        by_pytorch: Whether PyTorch's layer makes the call, by its own rule.
        cell: The cell.
    """
    flat = flattened(weights)
    needs_grad = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (x, *flat, *(state if state is not None else ()))
    )
    dtype = _autocast_dtype(x, by_pytorch)
    state = None if state is None else (state[0].detach().to(dtype), state[1].detach().to(dtype))
    problem, _ = prepare(
        x.detach().to(dtype),
        state,
        tuple(weight.detach().to(dtype) for weight in flat),
        lengths=lengths,
        batch_sizes=batch_sizes,
        bidirectional=bidirectional,
        dropout=dropout,
        needs_grad=needs_grad,
        memory=memory,
        cell=cell,
    )
    device = probed(x.device)
    return decide_as_pytorch(problem, device) if by_pytorch else decide(problem, device, kernel)


def _autocast_dtype(x: Tensor, by_pytorch: bool) -> torch.dtype:
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x.dtype
    if by_pytorch:
        # Under every autocast its cuDNN call is in float16; on a CPU it has none.
        return torch.float16 if x.is_cuda else x.dtype
    return torch.get_autocast_dtype(x.device.type)

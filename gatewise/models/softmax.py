"""The softmax over a vocabulary and its loss, arranged so that 16-bit products run at full speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gatewise.contract.second_derivatives import once_differentiable
from gatewise.models.widening import copied, is_aligned, widened

# Whether the current code runs inside `plain_softmax`.
_plain: ContextVar[bool] = ContextVar("gatewise_plain_softmax", default=False)


@contextlib.contextmanager
def plain_softmax() -> Iterator[None]:
    """Compute token losses inside the block with the plain PyTorch code that their docstrings show."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def is_plain() -> bool:
    """Return whether the current code runs inside `plain_softmax`."""
    return _plain.get()


ONCE = (
    "The loss over a vocabulary",
    "Compute it within `gatewise.models.softmax.plain_softmax()`, or by torch.nn.functional.cross_entropy.",
)
"""What is differentiable once, and what to do for a second derivative."""


def token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    r"""Return $-\log \mathrm{softmax}(W h + b)_{target}$ of every row.

    16-bit products on a GPU use `widened_token_losses`; all others are
    ``cross_entropy(linear(hidden, weight, bias).float(), targets, reduction="none")``.

    Args:
        hidden: The hidden rows h [N, H], in the dtype of the products; under autocast any floating-point dtype.
        weight: The matrix W [V, H], of any floating-point dtype under autocast, otherwise of that of `hidden`.
        bias: The vector b [V], of the same dtypes as `weight`.
        targets: The target tokens, int64 [N], each in [0, V).

    Returns:
        The losses [N], in nats; float64 for float64 products, otherwise float32.
    """
    if hidden.is_cuda and product_dtype(hidden).itemsize == 2 and not is_plain():
        return widened_token_losses(hidden, weight, bias, targets)
    scores = functional.linear(hidden, weight, bias)
    numbers = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return functional.cross_entropy(scores.to(numbers), targets, reduction="none")


def widened_token_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Return the same losses as `token_losses`, arranged for the matrix kernels of GPUs; differentiable once.

    - The fast matrix kernels of Hopper and Blackwell require rows of a multiple of 16 bytes, which sizes such as 650 or
      1500 do not have. Rows are padded while they are converted or copied anyway; one of the new columns holds the
      bias, multiplied by a column of ones, so that its gradient needs no pass of its own.
    - The gradient of the logits replaces the logits in the forward pass. No float32 logits are kept.

    Numerics:
        Logits and their gradient are rounded to the dtype of the products, as `torch.nn.functional.linear` rounds
        them; the softmax is computed in the dtype of the result.
    """
    return _TokenLosses.apply(hidden, weight, bias, targets, product_dtype(hidden))


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        (size, vocabulary), wider = weight.shape[::-1], not is_aligned(*weight.shape)
        if wider:
            rows, columns = widened(hidden, 1.0, dtype, len(hidden)), widened(weight, bias, dtype, None)
            wide = rows @ columns.t()
        else:
            rows, columns = hidden.to(dtype), weight.to(dtype)
            wide = torch.addmm(bias.to(dtype), rows, columns.t())
        scores = wide[:, :vocabulary]
        logs = torch.log_softmax(scores, -1, torch.float64 if dtype == torch.float64 else torch.float32)
        losses = -logs.gather(1, targets.unsqueeze(1)).squeeze(1)
        if any(ctx.needs_input_grad):
            # The gradient of the logits is softmax - 1 at the target, and softmax elsewhere.
            scores.copy_(logs.exp_().scatter_add_(1, targets.unsqueeze(1), logs.new_full((len(hidden), 1), -1.0)))
            ctx.save_for_backward(rows, columns, wide)
            ctx.forms = wider, size, vocabulary, hidden.dtype, weight.dtype, bias.dtype
        return losses

    @staticmethod
    @once_differentiable(*ONCE)
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the stub takes no named gradients
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        rows, columns, wide = ctx.saved_tensors
        wider, size, vocabulary, *dtypes = ctx.forms
        share = gradient.unsqueeze(1)
        of_hidden = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_hidden = (wide @ columns)[:, :size].mul(share).to(dtypes[0])
        if any(ctx.needs_input_grad[1:3]):
            both = (wide.t() @ rows.mul(share).to(rows.dtype))[:vocabulary]
            of_weight = copied(both[:, :size], both.new_empty(vocabulary, size, dtype=dtypes[1]))
            of_bias = both[:, size] if wider else (share.to(wide.dtype).t() @ wide).squeeze(0)
            of_bias = of_bias.to(dtypes[2])
        return of_hidden, of_weight, of_bias, None, None


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product with this tensor under the current autocast settings."""
    autocast = torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype

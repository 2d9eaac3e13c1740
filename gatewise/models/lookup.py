"""The lookup of embeddings in the models of gatewise.

Within `gatewise.for_data_parallel`, its backward pass can hand over the gradients of the rows that were looked up, from
which several processes compute the gradient of the matrix (`gatewise.contract.token_factors`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gatewise.contract import token_factors
from gatewise.contract.data_parallel import multiprocessors_left
from gatewise.contract.token_factors import TokenFactors
from gatewise.contract.tracing import is_compiling
from gatewise.models.table_gradient import MOST_TOKENS, can_add, table_gradient

_NO_PADDING = -1
_MOST_UNSORTED = 3072  # tokens; PyTorch's operator sorts more of them, which takes longer


def new_table(size: int, width: int, device: torch.device | str | None) -> nn.Embedding:
    """Return embeddings [size, width] with PyTorch's initial values."""
    weight = None
    if device is not None and torch.device(device).type == "meta":
        # PyTorch would import its compiler, which takes seconds, to draw no numbers there.
        weight = torch.empty(size, width, device=device)
    return nn.Embedding(size, width, device=device, _weight=weight)


def looked_up(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """Return ``table(tokens)``, the embeddings [..., E] of tokens [...].

    In a block of `gatewise.for_data_parallel`, an autograd node of the same gradient computes it, which can leave the
    gradients of the rows to a receiver (`gatewise.contract.token_factors`): the gradient of the table is the product of
    the matrix that has a one in each row, at the token, with these.

    Args:
        table: The embeddings.
        tokens: The tokens, int64 or int32.
    """
    if multiprocessors_left.get() is None or not torch.is_grad_enabled() or is_compiling():
        return table(tokens)
    others = table.max_norm, table.sparse, table.scale_grad_by_freq, table._forward_hooks, table._forward_pre_hooks
    if any(others) or table.padding_idx is not None or type(table) is not nn.Embedding:
        return table(tokens)
    return _Lookup.apply(table.weight, tokens)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        ctx.rows_read = tokens
        widths, dtypes = (weight.shape[1], 1), (weight.dtype, tokens.dtype)
        most = MOST_TOKENS if can_add(weight, tokens) else _MOST_UNSORTED
        ctx.token_factors = TokenFactors(tokens.numel(), widths, dtypes, (0,), weight.dtype, 0, most)
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        receiver = token_factors.receiver_of(ctx)
        if receiver is None:
            return _of_table(gradient, tokens, ctx.rows), None
        of_rows, numbers = receiver.new(gradient)
        torch.mul(gradient.reshape(of_rows.shape), receiver.scale, out=of_rows)
        numbers.copy_(tokens.reshape(numbers.shape))
        rows = ctx.rows
        receiver.leave(lambda factors: [_of_table(factors[0], factors[1].squeeze(1), rows)])
        return None, None


def _of_table(gradient: Tensor, tokens: Tensor, rows: int) -> Tensor:
    # PyTorch's operator can be differentiated again, and the kernels cannot.
    if not torch.is_grad_enabled() and can_add(gradient, tokens):
        return table_gradient(gradient, tokens, rows)
    return torch.ops.aten.embedding_dense_backward(gradient, tokens, rows, _NO_PADDING, False)

"""Parameters in the layout and dtype of the steps' products."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.feeding.call import Layer, Weights


def layers(weights: Weights, dtype: torch.dtype, operand: torch.dtype) -> tuple[Layer, ...]:
    """Return one matrix [4H, 2H] and one bias [4H] per layer; the first layer's weights of embeddings are left out."""
    units = weights.attended.shape[0]
    return tuple(
        Layer(_concatenated(own.w_ih[:, -units:], own.w_hh, 1, operand), (own.b_ih + own.b_hh).to(dtype))
        for own in weights.layers
    )


def from_embeddings(weights: Weights, dtype: torch.dtype) -> Tensor:
    """Return the first layer's weights of the embeddings [4H, E]."""
    return weights.layers[0].w_ih[:, : -weights.attended.shape[0]].to(dtype)


def joining(weights: Weights, dtype: torch.dtype) -> Tensor:
    """Return the matrix for the top hidden state: the query's weights, if any, and the state's half of W_a."""
    units = weights.attended.shape[0]
    of_hidden = weights.attended[:, :units]
    return of_hidden.to(dtype) if weights.query is None else _concatenated(weights.query, of_hidden, 0, dtype)


def of_context(weights: Weights, dtype: torch.dtype) -> Tensor:
    """Return the context's half of W_a [H, V]."""
    return weights.attended[:, weights.attended.shape[0] :].to(dtype)


def _concatenated(first: Tensor, second: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    # The conversion is part of the copy, for which torch.cat has no option.
    shape = list(first.shape)
    shape[dim] += second.shape[dim]
    both = first.new_empty(shape, dtype=dtype)
    both.narrow(dim, 0, first.shape[dim]).copy_(first)
    both.narrow(dim, first.shape[dim], second.shape[dim]).copy_(second)
    return both

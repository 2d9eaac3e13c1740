"""Dropout whose masks are the same at all steps of a window, and dropout of whole words."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gatewise.contract.ranges import Range

_RATE = Range("from 0 to 1", 0, 1)


class LockedDropout(nn.Module):
    """Dropout with one mask for all steps of a call, also called variational dropout.

    Masks are drawn by PyTorch's generator on the device of the input, so that every replay of a CUDA graph draws new
    ones.

    Args:
        p: The probability of dropping a unit of a sequence, from 0 to 1; the others are multiplied by 1 / (1 - p).

    Raises:
        ArgumentError: `p` is not from 0 to 1.

    References:
        Gal, Ghahramani: A Theoretically Grounded Application of Dropout in Recurrent Neural Networks, 2016.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        _RATE.check("p", p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return the input [T, B, H], in training mode with dropped units."""
        _RATE.check("p", self.p)  # an attribute, which programs may set
        return x * _mask(x[:1], self.p) if self.training and self.p else x

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"


def with_dropped_words(embedded: Tensor, tokens: Tensor, vocabulary_size: int, rate: float) -> Tensor:
    """Return embeddings in which all occurrences of a word are dropped together.

    Args:
        embedded: The embeddings [..., E].
        tokens: The tokens, int64 [...], of any shape.
        vocabulary_size: The number of different tokens, V.
        rate: The probability of dropping a word; the embeddings of the others are multiplied by 1 / (1 - rate).

    Raises:
        ArgumentError: `rate` is not from 0 to 1.
    """
    _RATE.check("word_dropout", rate)
    # The same as a mask of the rows of the embedding matrix, without a copy of it.
    return embedded * _mask(embedded.new_empty(vocabulary_size), rate)[tokens].unsqueeze(-1)


def _mask(like: Tensor, rate: float) -> Tensor:
    kept = 1 - rate
    return torch.empty_like(like, requires_grad=False).bernoulli_(kept).div_(kept or 1.0)  # all zeros at rate 1

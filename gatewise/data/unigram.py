"""The unigram perplexity of a text: the baseline for any language model."""

from __future__ import annotations

import math

import torch


def unigram_perplexity(tokens: torch.Tensor) -> float:
    """Return the perplexity of a text under its own token frequencies: ``exp(-sum_w p(w) log p(w))``.

    This is the lowest perplexity that a model without context can reach on this text, because the frequencies are those
    of the text itself and not of the training text.

    Args:
        tokens: The tokens of the text, int64 [N].

    Returns:
        The perplexity, at least 1.
    """
    frequency = torch.bincount(tokens).double() / len(tokens)
    return math.exp(torch.special.entr(frequency).sum().item())

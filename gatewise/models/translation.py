"""From sentences to translations, by a model that goes on token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.models.beam_search import beam_search
from gatewise.models.greedy_search import GreedyGraphs, greedy_search
from gatewise.models.search import Decoder, Search, Translation


@torch.inference_mode()
def translate(
    model: Decoder, source: Tensor, lengths: Tensor, search: Search, graphs: GreedyGraphs | None = None
) -> list[list[Translation]]:
    """Translate sentences together.

    A translation that has not ended after twice the sentence's tokens and ten is ended there.

    Args:
        model: In evaluation mode.
        source: int64 [S, B], on the device of the model.
        lengths: Tokens of each sentence, int64 [B], there too.
        search: How.
        graphs: Recordings of this model's steps, with which one beam is faster on a GPU; see
            `gatewise.models.greedy_search`.

    Returns:
        The best `search.n_best` translations of each sentence, the best first; fewer where fewer were found.
    """
    if search.beam_size == 1:
        return greedy_search(model, source, lengths, search, graphs)
    return beam_search(model, source, lengths, search)

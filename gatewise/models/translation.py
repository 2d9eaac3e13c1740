"""Translation of sentences with a model that produces one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.contract.errors import ShapeError, sentence
from gatewise.models.arguments import as_int64
from gatewise.models.beam_search import beam_search
from gatewise.models.greedy_search import GreedyGraphs, greedy_search
from gatewise.models.search import Decoder, Search, Translation


@torch.inference_mode()
def translate(
    model: Decoder, source: Tensor, lengths: Tensor, search: Search, graphs: GreedyGraphs | None = None
) -> list[list[Translation]]:
    """Translate a batch of sentences.

    A translation ends at the latest after twice as many tokens as its sentence has, and ten more.

    Args:
        model: The model, in evaluation mode.
        source: The source tokens, integers [S, B], on the device of the model.
        lengths: The number of tokens of each sentence, integers [B], on the same device.
        search: The options of the search.
        graphs: CUDA graphs of this model's steps, which make greedy search faster on a GPU; see
            `gatewise.models.greedy_search`.

    Returns:
        The best `search.n_best` translations of each sentence, the best first; fewer if fewer were found.

    Raises:
        ShapeError: The source is no tensor of rank 2.
        ArgumentError: A token is not in the vocabulary.
    """
    if not isinstance(source, Tensor) or source.dim() != 2:
        got = list(source.shape) if isinstance(source, Tensor) else type(source).__name__
        raise ShapeError(sentence("source", "a tensor of tokens [S, B]", got))
    if not source.shape[1]:
        return []
    source, lengths = as_int64(source), as_int64(lengths)
    if search.beam_size == 1:
        return greedy_search(model, source, lengths, search, graphs)
    return beam_search(model, source, lengths, search)

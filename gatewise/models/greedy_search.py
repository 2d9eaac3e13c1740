"""The likeliest token at each step."""

from __future__ import annotations

import torch
from torch import Tensor

from gatewise.models.search import LOOK, Decoder, Search, Translation, log_probabilities, longest_translations


def greedy_search(model: Decoder, source: Tensor, lengths: Tensor, search: Search) -> list[list[Translation]]:
    """Take the likeliest token at each step; see `gatewise.models.translate`.

    Every few steps the host asks whether all translations have ended.
    """
    memory, state = model.encode(source, lengths)
    limits = longest_translations(lengths)
    tokens = torch.full_like(lengths, search.beginning)
    ended = torch.zeros_like(lengths, dtype=torch.bool)
    total = torch.zeros_like(lengths, dtype=torch.float32)
    written, attentions = [], []
    for count in range(1, int(limits.max()) + 1):
        logits, state, attention = model.step(tokens, memory, state)
        logs = log_probabilities(logits, limits <= count, search)
        best, tokens = logs.max(-1)
        total += best.masked_fill(ended, 0.0)
        tokens = tokens.masked_fill(ended, search.end)
        written.append(tokens)
        attentions.append(attention.float())
        ended = ended | (tokens == search.end)
        if count % LOOK == 0 and ended.all():
            break
    rows, looks = torch.stack(written).t().tolist(), torch.stack(attentions, 1).cpu()
    found = []
    for row, log_probability, look, length in zip(rows, total.tolist(), looks, lengths.tolist(), strict=True):
        count = row.index(search.end)
        score = search.score(log_probability, count + 1)
        found.append([Translation(tuple(row[:count]), log_probability, score, look[: count + 1, :length].clone())])
    return found

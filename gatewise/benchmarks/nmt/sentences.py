"""Sentence pairs made by rule: nothing is downloaded, and there is something to learn.

A pair is about one of a few topics; each topic has words of its own on either side, and every word of a sentence is
drawn from those. Who knows nothing needs as many nats a word as the logarithm of the vocabulary, who knows which words
there are at all the logarithm of their number, and who sees the topic the logarithm of a topic's words: `floor`.
"""

from __future__ import annotations

import math

import torch

from gatewise.benchmarks.nmt.cases import TranslationCase
from gatewise.data import PairBatch
from gatewise.data.sentences import BEGINNING, END

_TOPICS, _WORDS = 40, 20
_FIRST = END + 1


def floor(case: TranslationCase) -> float:
    """Return the mean loss of who knows the topic and nothing else: nats a token, the end included."""
    return (case.target - 1) / case.target * math.log(_words(case)[1])


def draw(case: TranslationCase, count: int, device: torch.device, seed: int = 1) -> list[PairBatch]:
    """Draw batches, the same for a seed on every device.

    Args:
        case: Their sizes.
        count: How many.
        device: Where they are used.
        seed: Of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    topics, words = _words(case)
    batches = []
    for _ in range(count):
        topic = torch.randint(topics, (case.batch,), generator=generator)
        source, target = (
            _FIRST + topic * words + torch.randint(words, (length, case.batch), generator=generator)
            for length in (case.source, case.target - 1)
        )
        edge = torch.ones(1, case.batch, dtype=torch.int64)
        tensors = (
            source,
            torch.full((case.batch,), case.source),
            torch.cat([BEGINNING * edge, target]),
            torch.cat([target, END * edge]),
            torch.tensor(1 / (case.batch * case.target)),
            torch.arange(case.batch),
        )
        batches.append(PairBatch(*(tensor.to(device) for tensor in tensors), count=case.batch * case.target))
    return batches


def _words(case: TranslationCase) -> tuple[int, int]:
    """Return the number of topics and of words in each, as far as the smaller vocabulary reaches."""
    room = min(case.source_size, case.target_size) - _FIRST
    words = min(_WORDS, max(1, room // 4))
    return min(_TOPICS, room // words), words

"""Generated sentence pairs, from which a model can learn, without a download.

A pair is about one of a few topics. Each topic has its own words in both languages, and all words of a sentence are
drawn from those. The loss in nats per word is the logarithm of the vocabulary size for a model that knows nothing; that
of the number of words in use for a model that knows these; and that of the number of a topic's words, `floor`, for a
model that recognises the topic.
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
    """Return the mean loss of a model that recognises the topic only, in nats per token, including the end token."""
    return (case.target - 1) / case.target * math.log(_words(case)[1])


def draw(case: TranslationCase, count: int, device: torch.device, seed: int = 1) -> list[PairBatch]:
    """Draw batches; a seed gives the same batches on every device.

    Args:
        case: The sizes.
        count: The number of batches.
        device: The device of the batches.
        seed: The seed.
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
    """Return the number of topics and the number of words of each, which the smaller vocabulary limits."""
    room = min(case.source_size, case.target_size) - _FIRST
    words = min(_WORDS, max(1, room // 4))
    return min(_TOPICS, room // words), words

"""What searching for translations is given, and what it finds."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.ranges import Range, check_ranges

LENGTH_PENALTY = Range("a number from -10 to 10", -10, 10)
LOOK = 4
"""Steps between two moments at which the host asks the device whether all translations have ended."""

_TIMES, _MORE = 2, 10
"""A translation has at most twice the tokens of its sentence, and ten more."""


class Decoder(Protocol):
    """What searching needs of a model, as `gatewise.models.Seq2Seq` has it.

    States are named tuples of tensors, whose dtypes are the same after every step; states and memories have
    `select(rows)`.
    """

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Any, Any]:
        """Read sentences int64 [S, B]; return what every step looks at, and the first state."""
        ...

    def step(self, tokens: Tensor, memory: Any, state: Any) -> tuple[Tensor, Any, Tensor]:
        """Read tokens int64 [B]; return logits [B, V], the next state, and attention [B, S]."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """How translations are looked for.

    Attributes:
        beginning: The token that a translation begins with; not a part of it.
        end: The token that ends it; not a part of it.
        forbidden: Tokens that no translation has.
        beam_size: Partial translations that are followed at a time; 1 takes the likeliest token at each step.
        length_penalty: alpha in score = log p / ((5 + tokens) / 6)^alpha, the end being a token; 0 favours short
            translations, 1 scores nearly by the mean over tokens.
        n_best: Translations returned of each sentence, at most `beam_size`.

    Raises:
        ArgumentError: `beam_size`, `length_penalty` or `n_best` is out of range.

    References:
        Wu and others: Google's Neural Machine Translation System, 2016, section 7 (the length penalty).
    """

    beginning: int
    end: int
    forbidden: tuple[int, ...] = ()
    beam_size: int = 1
    length_penalty: Annotated[float, LENGTH_PENALTY] = 1.0
    n_best: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be searched for."""
        check_ranges(self)
        if self.beam_size < 1:
            raise ArgumentError(sentence("beam_size", "a positive integer", self.beam_size))
        if not 1 <= self.n_best <= self.beam_size:
            advice = "Raise `beam_size` to see more translations."
            raise ArgumentError(sentence("n_best", f"from 1 to the beam size, {self.beam_size}", self.n_best, advice))

    def score(self, log_probability: float, tokens: int) -> float:
        """Return what translations are ranked by."""
        return log_probability / ((5 + tokens) / 6) ** self.length_penalty


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """A translation of one sentence.

    Attributes:
        tokens: Without beginning and end.
        log_probability: Of all tokens and the end, in nats.
        score: What it was ranked by.
        attention: For each token, and the end, how much attention each source token got: float32 [T + 1, S] on the CPU.
    """

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    attention: Tensor


def longest_translations(lengths: Tensor) -> Tensor:
    """Return the most tokens that the translation of each sentence may have, the end included; int64 [B]."""
    return _TIMES * lengths + _MORE


def log_probabilities(logits: Tensor, last: Tensor, search: Search) -> Tensor:
    """Return log-probabilities [N, V] in float32; a row whose translation must end here can do nothing else."""
    logs = logits.float().log_softmax(-1)
    for token in search.forbidden:
        logs[:, token] = -torch.inf
    end = logs[:, search.end].clone()
    logs = logs.masked_fill(last[:, None], -torch.inf)
    logs[:, search.end] = end
    return logs

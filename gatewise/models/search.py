"""The options and results of searching for translations."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.ranges import Range, check_ranges
from gatewise.models.arguments import check_forbidden

LENGTH_PENALTY = Range("a number from -10 to 10", -10, 10)
LOOK = 4
"""The number of steps between two checks, by the host, of whether all translations have ended."""

_TIMES, _MORE = 2, 10
"""A translation has at most twice as many tokens as its sentence, and ten more."""


class Decoder(Protocol):
    """The interface of a model that can be searched, such as `gatewise.models.Seq2Seq`.

    States are named tuples of tensors, whose dtypes are the same after every step; states and memories have a method
    `select(rows)`.
    """

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Any, Any]:
        """Encode sentences int64 [S, B]; return the memory that attention reads, and the initial state."""
        ...

    def step(self, tokens: Tensor, memory: Any, state: Any) -> tuple[Tensor, Any, Tensor]:
        """Run one step on tokens int64 [B]; return logits [B, V], the next state, and attention weights [B, S]."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """The options of a search for translations.

    Attributes:
        beginning: The begin token, which is not part of a translation.
        end: The end token, which is not part of a translation.
        forbidden: Tokens that never occur in a translation.
        beam_size: The number of beams; 1 is greedy search.
        length_penalty: The exponent alpha in score = log p / ((5 + tokens) / 6)^alpha, where the end counts as a token.
            0 favours short translations; 1 nearly ranks by the mean over tokens.
        n_best: The number of translations to return for each sentence, at most `beam_size`.

    Raises:
        ArgumentError: `beam_size`, `length_penalty` or `n_best` is out of range, or `end` is forbidden.

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
        """Raise if an option is out of range."""
        check_ranges(self)
        if self.beam_size < 1:
            raise ArgumentError(sentence("beam_size", "a positive integer", self.beam_size))
        if not 1 <= self.n_best <= self.beam_size:
            advice = "Raise `beam_size` to see more translations."
            raise ArgumentError(sentence("n_best", f"from 1 to the beam size, {self.beam_size}", self.n_best, advice))
        check_forbidden(self.forbidden)
        if self.end in self.forbidden:
            advice = "Every translation ends with it."
            raise ArgumentError(sentence("forbidden", f"without the end token, {self.end}", self.forbidden, advice))

    def score(self, log_probability: float, tokens: int) -> float:
        """Return the score by which translations are ranked."""
        return log_probability / ((5 + tokens) / 6) ** self.length_penalty


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """A translation of one sentence.

    Attributes:
        tokens: The tokens without begin and end.
        log_probability: The log-probability of all tokens and the end, in nats.
        score: The score by which it was ranked.
        attention: The attention weights of each token, and of the end, over the source tokens: float32 [T + 1, S] on
            the CPU.
    """

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    attention: Tensor


def longest_translations(lengths: Tensor) -> Tensor:
    """Return the maximum number of tokens of each sentence's translation, the end included; int64 [B]."""
    return _TIMES * lengths + _MORE


def log_probabilities(logits: Tensor, last: Tensor, search: Search) -> Tensor:
    """Return log-probabilities [N, V] in float32; rows that are at their maximum length can only end."""
    for name, tokens in (("end", (search.end,)), ("forbidden", search.forbidden)):
        for token in tokens:
            if not 0 <= token < logits.shape[-1]:
                raise ArgumentError(sentence(name, f"a token from 0 to {logits.shape[-1] - 1}", token))
    logs = logits.float().log_softmax(-1)
    for token in search.forbidden:
        logs[:, token] = -torch.inf
    end = logs[:, search.end].clone()
    logs = logs.masked_fill(last[:, None], -torch.inf)
    logs[:, search.end] = end
    return logs

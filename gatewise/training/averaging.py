"""Averages of weights over steps, which often generalise better than the weights of the last step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypedDict

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from gatewise.training.options import TrainingOptions


class AverageFacts(TypedDict):
    """The state of an average, other than its values, as JSON values."""

    count: int
    running: bool
    losses: list[float]


class WeightAverage:
    """A running mean of weights, computed by the functions of `torch.optim.swa_utils`.

    ``average += (weights - average) * max(1 / n, 1 - decay)`` at the n-th step: an exact mean for the first steps, an
    exponential average afterwards. With ``"tail"`` the decay is 1, so that the mean is always exact. With ``"last"`` it
    is the mean of the weights at the last few evaluations, including the current one.

    Args:
        parameters: The weights.
        options: The options; those whose names start with `average` are read.

    References:
        Polyak, Juditsky: Acceleration of Stochastic Approximation by Averaging, 1992.
        Vaswani and others: Attention Is All You Need, 2017, section 6.1 (the last few checkpoints).
        Merity, Keskar, Socher: Regularizing and Optimizing LSTM Language Models, 2018, section 4 (when to begin).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], options: TrainingOptions) -> None:
        # Not `AveragedModel`: it copies its counter to the device in every step, which synchronises, and it cannot
        # compute the mean of the last few evaluations.
        self._parameters: list[torch.Tensor] = list(parameters)
        self._decay = options.average_decay if options.average == "ema" else 1.0
        self._waits = options.average == "tail"
        self._patience = options.average_patience
        # The number of stored earlier evaluations, whose memory is reused in turn.
        self._room = options.average_last - 1 if options.average == "last" else 0
        self._losses: list[float] = []
        self.count = 0
        self.running = options.average == "ema"
        self._take_equally, self._take_recent = get_swa_multi_avg_fn(), get_ema_multi_avg_fn(self._decay)
        copies = {"none": 0, "last": self._room}.get(options.average, 1)
        self.values = [parameter.detach().clone() for _ in range(copies) for parameter in self._parameters]

    def update(self) -> None:
        """Update the average with the weights of this step."""
        if not self.running:
            return
        take = self._take_equally if 1 / (self.count + 1) > 1 - self._decay else self._take_recent
        take(self.values, self._parameters, self.count)
        self.count += 1

    @torch.no_grad()
    def evaluated(self, loss: float) -> None:
        """Update the average after an evaluation: with its loss for ``"tail"``, with the weights for ``"last"``."""
        if self._waits and not self.running:
            earlier = self._losses[: len(self._losses) - self._patience]
            self.running = bool(earlier) and loss > min(earlier)
            self._losses.append(loss)
        if self._room:
            torch._foreach_copy_(self._kept(self.count % self._room), self._parameters)
            self.count += 1

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the weights by their average inside the context; without an average, do nothing."""
        if not self.count:
            yield
            return
        if self._room:
            with self._mean_of_last():
                yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @contextlib.contextmanager
    def _mean_of_last(self) -> Iterator[None]:
        own = [parameter.detach().clone() for parameter in self._parameters]
        earlier = min(self.count, self._room)
        with torch.no_grad():
            for place in range(earlier):
                torch._foreach_add_(self._parameters, self._kept(place))
            torch._foreach_div_(self._parameters, earlier + 1)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, own)

    def _kept(self, place: int) -> list[torch.Tensor]:
        """Return the weights of an earlier evaluation."""
        return self.values[place * len(self._parameters) : (place + 1) * len(self._parameters)]

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, value in zip(self._parameters, self.values, strict=True):
            kept = parameter.clone()
            parameter.copy_(value)
            value.copy_(kept)

    def facts(self) -> AverageFacts:
        """Return the state other than `values`, as JSON values."""
        return {"count": self.count, "running": self.running, "losses": self._losses}

    def restore(self, facts: AverageFacts) -> None:
        """Restore the state that `facts()` returned."""
        self.count, self.running, self._losses = facts["count"], facts["running"], list(facts["losses"])

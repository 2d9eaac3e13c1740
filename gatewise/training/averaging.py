"""Averages of weights over steps, which often generalise better than the last weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from gatewise.training.options import TrainingOptions


class WeightAverage:
    """A running mean of weights.

    ``average += (weights - average) * max(1 / n, 1 - decay)`` at the n-th step: exact for the first steps, exponential
    afterwards; with ``"tail"`` the decay is 1 and the mean exact throughout.

    Args:
        parameters: The weights.
        options: `average`, `average_decay` and `average_patience` are read.

    References:
        Polyak, Juditsky: Acceleration of Stochastic Approximation by Averaging, 1992.
        Merity, Keskar, Socher: Regularizing and Optimizing LSTM Language Models, 2018, section 4 (when to begin).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], options: TrainingOptions) -> None:
        self._parameters = list(parameters)
        self._decay = options.average_decay if options.average == "ema" else 1.0
        self._waits = options.average == "tail"
        self._patience = options.average_patience
        self._losses: list[float] = []
        self.count = 0
        self.running = options.average == "ema"
        self.values = (
            [parameter.detach().clone() for parameter in self._parameters] if options.average != "none" else []
        )

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of this step into the mean."""
        if not self.running:
            return
        self.count += 1
        torch._foreach_lerp_(self.values, self._parameters, max(1 / self.count, 1 - self._decay))

    def evaluated(self, loss: float) -> None:
        """Begin the ``"tail"`` once the loss is worse than the best of all but the last few evaluations."""
        if self._waits and not self.running:
            earlier = self._losses[: len(self._losses) - self._patience]
            self.running = bool(earlier) and loss > min(earlier)
            self._losses.append(loss)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the mean in place of the weights for a while; without a mean, do nothing."""
        if not self.count:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, value in zip(self._parameters, self.values, strict=True):
            kept = parameter.clone()
            parameter.copy_(value)
            value.copy_(kept)

    def facts(self) -> dict[str, object]:
        """Return what must be remembered beside `values`, as JSON."""
        return {"count": self.count, "running": self.running, "losses": self._losses}

    def restore(self, facts: dict[str, object]) -> None:
        """Go on from `facts()`."""
        self.count, self.running, self._losses = facts["count"], facts["running"], list(facts["losses"])

"""What a run has measured so far."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

_OVERFLOWS = 709.0
"""Nats from which on the exponential is no float64 any more, rounded down."""


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """One look at the validation data.

    Attributes:
        epoch: Epochs done, counting parts.
        step: Optimizer steps done.
        train_loss: Mean training loss since the evaluation before, nats a token, with dropout.
        valid_loss: Validation loss, nats a token.
        learning_rate: Of the last step.
        tokens_per_second: Training tokens since the evaluation before, over the time spent on training.
        seconds: Time spent on training and evaluation so far.
        best: Whether no earlier evaluation was as good.
        scores: What else was measured on the validation data, by name; NaN where there is no number for it.
    """

    epoch: float
    step: int
    train_loss: float
    valid_loss: float
    learning_rate: float
    tokens_per_second: float
    seconds: float
    best: bool
    scores: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Where training is, told about twice a second.

    Attributes:
        epoch: The epoch that runs, from 0.
        step: Optimizer steps done.
        total_steps: Steps in the whole run.
        loss: Mean training loss since the last report, nats a token.
        learning_rate: Of the last step.
        tokens_per_second: Since the last report.
    """

    epoch: int
    step: int
    total_steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, infinity where that overflows, NaN of NaN.

    Args:
        loss: Nats a token.
    """
    return math.exp(loss) if not loss >= _OVERFLOWS else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """How a loss is shown to people.

    Attributes:
        name: What it is called.
        short: The same, for headings of columns.
        of: From the loss to what is shown.
        digits: Places behind the point.
        score: The score that is shown beside it, one of `Evaluation.scores`; empty for none.
    """

    name: str
    short: str
    of: Callable[[float], float]
    digits: int = 2
    score: str = ""


PERPLEXITY = Measure("perplexity", "ppl", perplexity)

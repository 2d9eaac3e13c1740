"""The measurements of a training run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

_OVERFLOWS = 709.0
"""The loss in nats above which its exponential overflows float64, rounded down."""


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation on the validation data.

    Attributes:
        epoch: The number of epochs so far, with fractions.
        step: The number of optimizer steps so far.
        train_loss: The mean training loss since the previous evaluation, in nats per token, with dropout.
        valid_loss: The validation loss, in nats per token.
        learning_rate: The learning rate of the last step.
        tokens_per_second: The training tokens since the previous evaluation, divided by the training time.
        seconds: The time of training and evaluation so far, in seconds.
        best: Whether this evaluation is better than all earlier ones.
        scores: Other measurements on the validation data, by name; NaN for those that are undefined.
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


def merit(valid_loss: float, scores: Mapping[str, float], best_by: str) -> float:
    """Return a number that is larger for better weights.

    Args:
        valid_loss: The validation loss, in nats per token.
        scores: Other measurements on the validation data, by name.
        best_by: ``"loss"``, or the name of a score.
    """
    return -valid_loss if best_by == "loss" else scores[best_by]


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """The progress of training, which is reported about twice a second.

    Attributes:
        epoch: The current epoch, counted from 0.
        step: The number of optimizer steps so far.
        total_steps: The number of steps in the whole run.
        loss: The mean training loss since the last report, in nats per token.
        learning_rate: The learning rate of the last step.
        tokens_per_second: The training tokens per second since the last report.
    """

    epoch: int
    step: int
    total_steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``; infinity if that overflows, NaN for NaN.

    Args:
        loss: The loss in nats per token.
    """
    return math.exp(loss) if not loss >= _OVERFLOWS else math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """The format in which a loss is shown.

    Attributes:
        name: The name of the quantity.
        short: A short name, for column headings.
        of: A function from the loss to the quantity.
        digits: The number of digits after the decimal point.
        score: The score that is shown beside it, one of `Evaluation.scores`; empty for none.
    """

    name: str
    short: str
    of: Callable[[float], float]
    digits: int = 2
    score: str = ""


PERPLEXITY = Measure("perplexity", "ppl", perplexity)

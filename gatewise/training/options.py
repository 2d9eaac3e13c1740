"""Everything about a training run that is neither the model nor the text."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.option import Option
from gatewise.contract.ranges import AMOUNT, COUNT_OR_NONE, LARGEST, POSITIVE, SEED, Range, check_ranges

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "plateau")
AVERAGES = ("none", "ema", "tail", "last")
PRECISIONS = ("float32", "tf32", "bfloat16")

_MORE_THAN_NONE = Range("greater than 0", 1, LARGEST)
_DECAY = Range("in [0, 1)", 0, 1, below=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How to train.

    Attributes:
        epochs: Passes over the training data.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``.
        learning_rate: The largest learning rate of the run.
        momentum: Momentum of SGD; the first beta of Adam and AdamW.
        weight_decay: Decay of weights (not of biases): added to the gradient by SGD and Adam, decoupled in AdamW.
        clip: Largest norm of all gradients together; 0 does not clip.
        clip_value: Largest absolute value of each gradient, before the norm is looked at; 0 does not clip.
        schedule: ``"constant"``; ``"cosine"``, down to zero at the last step; or ``"plateau"``, multiplied by
            `plateau_factor` when the validation loss has not improved for more than `plateau_patience` evaluations.
        warmup_steps: Steps over which the learning rate rises linearly from zero, under any schedule.
        plateau_factor: See `schedule`.
        plateau_patience: See `schedule`.
        average: Which weights are evaluated and kept: ``"none"``, those of the last step; ``"ema"``, an exponential
            moving average; ``"tail"``, the mean of all steps since the validation loss was first worse than the best of
            all but the last `average_patience` evaluations; ``"last"``, the mean of the weights at the last
            `average_last` evaluations.
        average_decay: Decay of ``"ema"`` a step.
        average_patience: See `average`.
        average_last: See `average`.
        precision: ``"float32"``; ``"tf32"``, float32 with TensorFloat-32 products on GPUs that have them; or
            ``"bfloat16"``, autocast to it.
        cuda_graph: Whether steps on GPUs are captured and replayed as a CUDA graph where that is possible; the
            numbers are the same.
        seed: Seed of initial weights, dropout and the order of the data.
        evaluations_per_epoch: How often the validation loss is measured, at equal distances.
        patience: Stop after so many evaluations without improvement; 0 never stops early.
        checkpoint_seconds: Largest time between checkpoints, which are also written at every evaluation.
        checkpoint_steps: Largest number of steps between checkpoints; 0 leaves it to the time.
    """

    epochs: Annotated[int, _MORE_THAN_NONE, Option("Passes over the training data.")] = 10
    optimizer: Annotated[str, Option("sgd, adam or adamw.")] = "adamw"
    learning_rate: Annotated[float, POSITIVE, Option("The largest learning rate.")] = 2e-3
    momentum: Annotated[float, _DECAY] = 0.9
    weight_decay: Annotated[float, AMOUNT] = 0.0
    clip: Annotated[float, AMOUNT, Option("The largest norm of all gradients; 0: off.")] = 1.0
    clip_value: Annotated[float, AMOUNT, Option("The largest value of each gradient, before the norm; 0: off.")] = 0.0
    schedule: Annotated[str, Option("constant, cosine or plateau.")] = "cosine"
    warmup_steps: Annotated[int, COUNT_OR_NONE] = 0
    plateau_factor: Annotated[float, POSITIVE] = 0.25
    plateau_patience: Annotated[int, COUNT_OR_NONE] = 0
    average: Annotated[str, Option("Average of weights: none, ema, tail or last.")] = "none"
    average_decay: Annotated[float, _DECAY] = 0.999
    average_patience: Annotated[int, COUNT_OR_NONE] = 1
    average_last: Annotated[int, _MORE_THAN_NONE] = 5
    precision: Annotated[str, Option("float32, tf32 or bfloat16.")] = "float32"
    cuda_graph: Annotated[bool, Option("Replay each step as one CUDA graph.")] = True
    seed: Annotated[int, SEED, Option("The seed of weights, dropout and the order of data.")] = 0
    evaluations_per_epoch: Annotated[int, _MORE_THAN_NONE] = 1
    patience: Annotated[int, COUNT_OR_NONE, Option("Stop so many evaluations after the best; 0: never.")] = 0
    checkpoint_seconds: Annotated[float, POSITIVE] = 60.0
    checkpoint_steps: Annotated[int, COUNT_OR_NONE] = 0

    def __post_init__(self) -> None:
        """Refuse what is out of range, in a sentence."""
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("average", AVERAGES),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in known:
                raise ArgumentError(sentence(name, f"one of {', '.join(known)}", repr(getattr(self, name))))
        check_ranges(self)

"""The options of training, other than those of model and data."""

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
    """The options of training.

    Attributes:
        epochs: The number of passes over the training data.
        optimizer: The optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``.
        learning_rate: The largest learning rate of the run.
        momentum: The momentum of SGD; the first beta of Adam and AdamW.
        beta2: The second beta of Adam and AdamW.
        weight_decay: The decay of weights (not of biases): added to the gradient by SGD and Adam, decoupled in AdamW.
        clip: The largest norm of all gradients together; 0 for no clipping.
        clip_value: The largest absolute value of each gradient, clipped before the norm is computed; 0 for no clipping.
        schedule: The learning rate schedule: ``"constant"``; ``"cosine"``, which falls to zero at the last step; or
            ``"plateau"``, which multiplies by `plateau_factor` when the validation loss has not improved for more than
            `plateau_patience` evaluations.
        warmup_steps: The number of steps in which the learning rate rises linearly from zero, under any schedule.
        rate_tokens: The number of tokens of a batch, over all processes, for which the learning rate is that of the
            schedule; for others it is multiplied by their number divided by this. 0 does not multiply.
            Classifiers have no such option, because their batches are counted in sequences.
        plateau_factor: The factor of ``"plateau"``.
        plateau_patience: The number of evaluations of ``"plateau"``.
        average: The weights that are evaluated and saved: ``"none"`` for those of the last step; ``"ema"`` for an
            exponential moving average; ``"tail"`` for the mean of all steps since the validation loss was first worse
            than the best of all but the last `average_patience` evaluations; ``"last"`` for the mean of the weights at
            the last `average_last` evaluations.
        average_decay: The decay of ``"ema"`` per step.
        average_patience: The number of evaluations of ``"tail"``.
        average_last: The number of evaluations of ``"last"``.
        precision: The precision: ``"float32"``; ``"tf32"`` for float32 with TensorFloat-32 products on GPUs that have
            them; or ``"bfloat16"`` for autocast to it.
        cuda_graph: Whether steps on GPUs are captured and replayed as CUDA graphs if possible; the results are the
            same.
        exchange_bfloat16: Whether several processes send their gradients in bfloat16, half the bytes of float32; see
            `gatewise.training.exchange.GradientExchange` for the error.
        exchange_rows: Whether several processes send only those rows of the gradients of embeddings that occur in their
            batches, where these are fewer bytes than the whole matrix.
        exchange_factors: Whether several processes on GPUs send the factors of a weight's gradient, which is a product
            over tokens, where that is estimated to take less time than sending the gradient; see
            `gatewise.training.exchange.GradientExchange`.
        seed: The seed of initial weights, dropout and the order of the data.
        evaluations_per_epoch: The number of evaluations per epoch, at equal distances.
        epochs_per_evaluation: The number of epochs between evaluations; the last epoch always ends with one.
        best_by: The figure by which the best weights are chosen: ``"loss"`` for the validation loss, or the name of a
            score of the task, which is larger for better weights.
        patience: The number of evaluations without improvement after which training stops; 0 never stops early.
        checkpoint_seconds: The largest time between checkpoints.
        checkpoint_evaluations: The number of evaluations after which a checkpoint is written; one is always written at
            the end.
        checkpoint_steps: The largest number of steps between checkpoints; 0 for no limit on steps.
    """

    epochs: Annotated[int, _MORE_THAN_NONE, Option("Passes over the training data.")] = 10
    optimizer: Annotated[str, Option("sgd, adam or adamw.")] = "adamw"
    learning_rate: Annotated[float, POSITIVE, Option("The largest learning rate.")] = 2e-3
    momentum: Annotated[float, _DECAY] = 0.9
    beta2: Annotated[float, _DECAY] = 0.999
    weight_decay: Annotated[float, AMOUNT] = 0.0
    clip: Annotated[float, AMOUNT, Option("Largest norm of all gradients; 0: no clipping.")] = 1.0
    clip_value: Annotated[float, AMOUNT, Option("Largest absolute value of a gradient; 0: no clipping.")] = 0.0
    schedule: Annotated[str, Option("constant, cosine or plateau.")] = "cosine"
    warmup_steps: Annotated[int, COUNT_OR_NONE] = 0
    rate_tokens: Annotated[int, COUNT_OR_NONE] = 0
    plateau_factor: Annotated[float, POSITIVE] = 0.25
    plateau_patience: Annotated[int, COUNT_OR_NONE] = 0
    average: Annotated[str, Option("Average of weights: none, ema, tail or last.")] = "none"
    average_decay: Annotated[float, _DECAY] = 0.999
    average_patience: Annotated[int, COUNT_OR_NONE] = 1
    average_last: Annotated[int, _MORE_THAN_NONE] = 5
    precision: Annotated[str, Option("float32, tf32 or bfloat16.")] = "float32"
    cuda_graph: Annotated[bool, Option("Capture steps as CUDA graphs.")] = True
    exchange_bfloat16: Annotated[bool, Option("Send gradients in bfloat16 between processes.")] = False
    exchange_rows: Annotated[bool, Option("Send only used rows of gradients of embeddings.")] = False
    exchange_factors: Annotated[bool, Option("Send factors of gradients where that is faster.")] = True
    seed: Annotated[int, SEED, Option("The seed of weights, dropout and the order of data.")] = 0
    evaluations_per_epoch: Annotated[int, _MORE_THAN_NONE] = 1
    epochs_per_evaluation: Annotated[int, _MORE_THAN_NONE] = 1
    best_by: str = "loss"
    patience: Annotated[int, COUNT_OR_NONE, Option("Stop after this many evaluations without gain; 0: never.")] = 0
    checkpoint_seconds: Annotated[float, POSITIVE] = 60.0
    checkpoint_evaluations: Annotated[int, _MORE_THAN_NONE] = 1
    checkpoint_steps: Annotated[int, COUNT_OR_NONE] = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("average", AVERAGES),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in known:
                raise ArgumentError(sentence(name, f"one of {', '.join(known)}", repr(getattr(self, name))))
        check_ranges(self)
        if self.epochs_per_evaluation > 1 and self.evaluations_per_epoch > 1:
            expectation = f"1 with {self.evaluations_per_epoch} evaluations per epoch"
            raise ArgumentError(sentence("epochs_per_evaluation", expectation, self.epochs_per_evaluation))

    def check_best_by(self, *scores: str) -> None:
        """Raise an `ArgumentError` unless `best_by` is "loss" or one of the scores of a task."""
        known = ("loss", *scores)
        if self.best_by not in known:
            raise ArgumentError(sentence("best_by", f"one of {', '.join(known)}", repr(self.best_by)))

"""Recipes of `gatewise train classify`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from gatewise.cli.folder_name import FOLDER_NAME
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.option import Option
from gatewise.contract.ranges import (
    AMOUNT,
    COUNT,
    LAYERS,
    NUMBER,
    PROBABILITY,
    SEED,
    SIZE,
    THREADS,
    check_ranges,
)
from gatewise.data import Columns
from gatewise.data.sequences import SEQUENCE_SHARES
from gatewise.training.options import TrainingOptions

DIGITS, SYNTHETIC = "digits", "synthetic"
TASKS = ("classification", "regression")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """The sequences and how they are read: section `[data]`.

    Attributes:
        source: ``"digits"``, scikit-learn's handwritten digits read row by row; ``"synthetic"``, the task of the
            CudnnLSTM training template; or the path of one .csv, .parquet or .npz file, which is split by `shares`. Not
            used if the three files are given.
        train: The path of the training sequences.
        valid: The path of the validation sequences.
        test: The path of the test sequences.
        shares: The fractions of the sequences, drawn at random, for training, validation and test.
        division_seed: The seed of the random split.
        task: ``"classification"`` if labels are names of classes; ``"regression"`` if labels are numbers.
        sequence_column: The column with the name of a row's sequence.
        time_column: The column by which the rows of a sequence are sorted; empty if they are in order.
        label_column: The column to predict.
        features: The columns with the input features; empty for all other columns.
        allow_gaps: Whether the time between rows may vary.
        standardize: Whether features, and targets of a regression, are scaled to mean 0 and standard deviation 1.
        batch_size: The number of sequences in a batch, over all processes.
        evaluation_batch_size: The batch size for validation and test.
    """

    source: Annotated[str, Option("A .csv, .parquet or .npz file, or digits or synthetic.", name="--data")] = DIGITS
    train: Annotated[str, Option("The training sequences.")] = ""
    valid: Annotated[str, Option("The validation sequences.")] = ""
    test: Annotated[str, Option("The test sequences.")] = ""
    shares: tuple[float, float, float] = SEQUENCE_SHARES
    division_seed: Annotated[int, SEED] = 0
    task: Annotated[str, Option("classification or regression.")] = TASKS[0]
    sequence_column: Annotated[str, Option("The column with the name of a row's sequence.")] = "sequence"
    time_column: Annotated[str, Option("The column to sort the rows by; '': no sorting.")] = "time"
    label_column: Annotated[str, Option("The column to predict.")] = "label"
    features: Annotated[tuple[str, ...], Option("An input column; repeatable; default: all.", name="--feature")] = ()
    allow_gaps: Annotated[bool, Option("Allow varying time between rows.")] = False
    standardize: Annotated[bool, Option("Scale features to mean 0 and deviation 1.")] = True
    batch_size: Annotated[int, COUNT, Option("Sequences per batch.")] = 64
    evaluation_batch_size: Annotated[int, COUNT] = 256

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)
        if self.task not in TASKS:
            raise ArgumentError(sentence("task", f"one of {', '.join(TASKS)}", repr(self.task)))
        for name in ("sequence_column", "label_column"):
            if not getattr(self, name):
                raise ArgumentError(sentence(name, "the name of a column", "an empty one"))

    @property
    def columns(self) -> Columns:
        """The columns of tables."""
        return Columns(
            sequence=self.sequence_column,
            time=self.time_column,
            label=self.label_column,
            features=self.features,
            allow_gaps=self.allow_gaps,
        )

    @property
    def numbers(self) -> bool:
        """Whether labels are numbers."""
        return self.task == "regression"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierOptions:
    """The arguments of `gatewise.models.SequenceClassifier`: `[model]`.

    Attributes:
        hidden_size: The number of hidden units of each layer and direction.
        num_layers: The number of LSTM layers.
        bidirectional: Whether the layers are bidirectional.
        pooling: The pooling of outputs over time: ``"mean"``, ``"last"`` or ``"max"``.
        dropout: The dropout probability before the output layer.
        layer_dropout: The dropout probability between LSTM layers.
        kernel: The kernel of the LSTM; ``"auto"`` chooses the fastest.
    """

    hidden_size: Annotated[int, SIZE, Option("Hidden units per layer and direction.")] = 64
    num_layers: Annotated[int, LAYERS, Option("LSTM layers.")] = 2
    bidirectional: Annotated[bool, Option("Use bidirectional layers.")] = True
    pooling: Annotated[str, Option("Pooling over time: mean, last or max.")] = "mean"
    dropout: Annotated[float, PROBABILITY, Option("Both dropout probabilities.", also=("layer_dropout",))] = 0.2
    layer_dropout: Annotated[float, PROBABILITY] = 0.2
    kernel: Annotated[str, Option("auto, or the name of a kernel.")] = "auto"

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierExpectation:
    """The expected results, which are compared and printed at the end of the run: section `[expect]`.

    Attributes:
        test_accuracy: The least accuracy on the test sequences; 0 for no expectation.
        test_r2: The least R2 on the test sequences of a regression; 0 for no expectation.
        minutes: The duration on the device named in `on`; 0 for no expectation.
        on: The name of the device for `minutes`.
    """

    test_accuracy: Annotated[float, AMOUNT] = 0.0
    test_r2: Annotated[float, NUMBER] = 0.0
    minutes: Annotated[float, AMOUNT] = 0.0
    on: str = ""

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


_TRAINING = TrainingOptions(epochs=30, optimizer="adam", learning_rate=5e-3, patience=10)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierRecipe:
    """A complete training run.

    Attributes:
        name: The name of the run, and of its folder under `runs/`.
        description: A description in one line.
        threads: The number of CPU threads; 0 for PyTorch's default. The bits of a result depend on it. More than one
            thread pays off for large models only.
        data: The section `[data]`; see `DataOptions`.
        model: The section `[model]`; see `ClassifierOptions`.
        training: The section `[training]`; see `gatewise.training.TrainingOptions`.
        expect: The section `[expect]`; see `ClassifierExpectation`.
    """

    name: Annotated[str, FOLDER_NAME] = "classify"
    description: str = ""
    threads: Annotated[int, THREADS, Option("CPU threads; 0: PyTorch's default.")] = 1
    data: DataOptions = DataOptions()
    model: ClassifierOptions = ClassifierOptions()
    training: TrainingOptions = _TRAINING
    expect: ClassifierExpectation = ClassifierExpectation()

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)
        self.training.check_best_by()
        if self.training.rate_tokens:
            advice = "A classifier's batches are counted in sequences, data.batch_size of them."
            raise ArgumentError(sentence("rate_tokens", "0 for a classifier", self.training.rate_tokens, advice))

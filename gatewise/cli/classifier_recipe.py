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
    """Which sequences, and how they are read: `[data]`.

    Attributes:
        source: ``"digits"``, scikit-learn's handwritten digits read row by row; ``"synthetic"``, the task of the
            CudnnLSTM training template; or the path of one .csv, .parquet or .npz file, which is divided by `shares`;
            not used when the three files are given.
        train: Path of the training sequences.
        valid: Path of the validation sequences.
        test: Path of the test sequences.
        shares: Fractions of the sequences, drawn at random, for training, validation and test.
        division_seed: Seed of that draw.
        task: ``"classification"``, labels name classes; or ``"regression"``, labels are numbers.
        sequence_column: The column that tells which sequence a row belongs to.
        time_column: The column that orders the rows of a sequence; empty when they are in order.
        label_column: The column to be predicted.
        features: The columns that are read; empty for all others.
        allow_gaps: Whether distances in time may differ.
        standardize: Whether features, and numbers to predict, are brought to mean 0 and standard deviation 1.
        batch_size: Sequences in a batch, over all processes.
        evaluation_batch_size: The same for validation and test.
    """

    source: Annotated[str, Option("A .csv, .parquet or .npz file, or digits or synthetic.", name="--data")] = DIGITS
    train: Annotated[str, Option("The training sequences.")] = ""
    valid: Annotated[str, Option("The validation sequences.")] = ""
    test: Annotated[str, Option("The test sequences.")] = ""
    shares: tuple[float, float, float] = SEQUENCE_SHARES
    division_seed: Annotated[int, SEED] = 0
    task: Annotated[str, Option("classification or regression.")] = TASKS[0]
    sequence_column: Annotated[str, Option("The column that says which sequence a row is of.")] = "sequence"
    time_column: Annotated[str, Option("The column that orders the rows; '': as they stand.")] = "time"
    label_column: Annotated[str, Option("The column that is to be answered.")] = "label"
    features: Annotated[tuple[str, ...], Option("A column to read; repeatable; default: all.", name="--feature")] = ()
    allow_gaps: Annotated[bool, Option("Distances in time may differ.")] = False
    standardize: Annotated[bool, Option("Bring features to mean 0 and deviation 1.")] = True
    batch_size: Annotated[int, COUNT, Option("Sequences in a batch.")] = 64
    evaluation_batch_size: Annotated[int, COUNT] = 256

    def __post_init__(self) -> None:
        """Refuse a task that does not exist, and columns without which there is nothing to learn."""
        check_ranges(self)
        if self.task not in TASKS:
            raise ArgumentError(sentence("task", f"one of {', '.join(TASKS)}", repr(self.task)))
        for name in ("sequence_column", "label_column"):
            if not getattr(self, name):
                raise ArgumentError(sentence(name, "the name of a column", "an empty one"))

    @property
    def columns(self) -> Columns:
        """How tables are read."""
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
        hidden_size: Units of each layer and direction.
        num_layers: LSTM layers.
        bidirectional: Whether sequences are read from both ends.
        pooling: ``"mean"``, ``"last"`` or ``"max"``: what stands for the sequence.
        dropout: Before the output layer.
        layer_dropout: Between LSTM layers.
        kernel: Which kernel the LSTM asks for; ``"auto"`` takes the fastest.
    """

    hidden_size: Annotated[int, SIZE, Option("Units of a layer and direction.")] = 64
    num_layers: Annotated[int, LAYERS, Option("LSTM layers.")] = 2
    bidirectional: Annotated[bool, Option("Read from both ends.")] = True
    pooling: Annotated[str, Option("mean, last or max.")] = "mean"
    dropout: Annotated[float, PROBABILITY, Option("The two dropouts at once.", also=("layer_dropout",))] = 0.2
    layer_dropout: Annotated[float, PROBABILITY] = 0.2
    kernel: Annotated[str, Option("auto, or a kernel by name.")] = "auto"

    def __post_init__(self) -> None:
        """Refuse what is out of range, in a sentence."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierExpectation:
    """What the run should reach, compared and printed at its end: `[expect]`.

    Attributes:
        test_accuracy: At least this on the test sequences; 0 expects nothing.
        test_r2: The same of R2, for a regression.
        minutes: Duration on the device named in `on`; 0 expects nothing.
        on: The device of `minutes`, in words.
    """

    test_accuracy: Annotated[float, AMOUNT] = 0.0
    test_r2: Annotated[float, NUMBER] = 0.0
    minutes: Annotated[float, AMOUNT] = 0.0
    on: str = ""

    def __post_init__(self) -> None:
        """Refuse what is out of range, in a sentence."""
        check_ranges(self)


_TRAINING = TrainingOptions(epochs=30, optimizer="adam", learning_rate=5e-3, patience=10)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierRecipe:
    """A complete run.

    Attributes:
        name: Also the name of its folder under `runs/`.
        description: One line.
        threads: CPU threads; 0 takes as many as PyTorch does. The bits of a result depend on it. More than one pays
            for large models only.
        data: See `DataOptions`.
        model: See `ClassifierOptions`.
        training: See `gatewise.training.TrainingOptions`.
        expect: See `ClassifierExpectation`.
    """

    name: Annotated[str, FOLDER_NAME] = "classify"
    description: str = ""
    threads: Annotated[int, THREADS, Option("CPU threads; 0: as many as PyTorch takes.")] = 1
    data: DataOptions = DataOptions()
    model: ClassifierOptions = ClassifierOptions()
    training: TrainingOptions = _TRAINING
    expect: ClassifierExpectation = ClassifierExpectation()

    def __post_init__(self) -> None:
        """Refuse what is out of range, in a sentence."""
        check_ranges(self)

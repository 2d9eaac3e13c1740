"""`gatewise train classify`: train a classifier or regressor of sequences."""

from __future__ import annotations

from typing import Annotated

import typer

from gatewise.cli import run_options
from gatewise.cli.run_options import MODEL, TRAINING

_DATA = "Data"


def classify(
    recipe: run_options.Recipe = None,
    settings: run_options.Settings = None,
    output: run_options.Output = None,
    resume: run_options.Resume = False,
    overwrite: run_options.Overwrite = False,
    device: run_options.Device = None,
    threads: run_options.Threads = None,
    source: Annotated[
        str | None,
        typer.Option("--data", help="A .csv, .parquet or .npz, or digits or synthetic.", rich_help_panel=_DATA),
    ] = None,
    train: Annotated[str | None, typer.Option(help="Training sequences.", rich_help_panel=_DATA)] = None,
    valid: Annotated[str | None, typer.Option(help="Validation sequences.", rich_help_panel=_DATA)] = None,
    test: Annotated[str | None, typer.Option(help="Test sequences.", rich_help_panel=_DATA)] = None,
    task: Annotated[str | None, typer.Option(help="classification or regression.", rich_help_panel=_DATA)] = None,
    sequence_column: Annotated[
        str | None, typer.Option(help="Which sequence a row is of.", rich_help_panel=_DATA)
    ] = None,
    time_column: Annotated[
        str | None, typer.Option(help="Orders the rows; '': as they stand.", rich_help_panel=_DATA)
    ] = None,
    label_column: Annotated[str | None, typer.Option(help="What is to be answered.", rich_help_panel=_DATA)] = None,
    features: Annotated[
        list[str] | None,
        typer.Option("--feature", help="A column to read; repeatable; default: all.", rich_help_panel=_DATA),
    ] = None,
    allow_gaps: Annotated[
        bool | None, typer.Option("--allow-gaps", help="Distances in time may differ.", rich_help_panel=_DATA)
    ] = None,
    standardize: Annotated[
        bool | None, typer.Option(help="Features to mean 0, deviation 1.", rich_help_panel=_DATA)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences in a batch.", rich_help_panel=_DATA)] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Units a layer and direction.", rich_help_panel=MODEL)] = None,
    num_layers: Annotated[int | None, typer.Option(help="LSTM layers.", rich_help_panel=MODEL)] = None,
    bidirectional: Annotated[bool | None, typer.Option(help="Read from both ends.", rich_help_panel=MODEL)] = None,
    pooling: Annotated[str | None, typer.Option(help="mean, last or max.", rich_help_panel=MODEL)] = None,
    dropout: Annotated[float | None, typer.Option(help="The two dropouts at once.", rich_help_panel=MODEL)] = None,
    kernel: run_options.Kernel = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the sequences.", rich_help_panel=TRAINING)] = None,
    patience: run_options.Patience = None,
    optimizer: run_options.Optimizer = None,
    learning_rate: run_options.LearningRate = None,
    schedule: run_options.Schedule = None,
    clip: run_options.Clip = None,
    clip_value: Annotated[
        float | None, typer.Option(help="Each gradient, before the norm; 0: off.", rich_help_panel=TRAINING)
    ] = None,
    precision: run_options.Precision = None,
    cuda_graph: run_options.CudaGraph = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, dropout and batches.", rich_help_panel=TRAINING)] = None,
) -> None:
    """Train an LSTM that tells what class a sequence is of, or a number.

    Without any option it reads scikit-learn's digits row by row, within a minute.

    Tables have one row a time step; .npz has x, lengths and y. See the docs.

    \b
    Examples:
      gatewise train classify
      gatewise train classify --data synthetic --pooling last
      gatewise train classify --data steps.csv --label-column kind
      gatewise train classify --data pumps.parquet --task regression
      gatewise train classify --output runs/classify --resume
      gatewise evaluate --checkpoint runs/classify
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from gatewise.cli.classifier_run import CLASSIFIER
    from gatewise.cli.launch import launch

    flags = {
        "threads": threads,
        "data.source": source,
        "data.train": train,
        "data.valid": valid,
        "data.test": test,
        "data.task": task,
        "data.sequence_column": sequence_column,
        "data.time_column": time_column,
        "data.label_column": label_column,
        "data.features": features or None,
        "data.allow_gaps": allow_gaps,
        "data.standardize": standardize,
        "data.batch_size": batch_size,
        "model.hidden_size": hidden_size,
        "model.num_layers": num_layers,
        "model.bidirectional": bidirectional,
        "model.pooling": pooling,
        "model.dropout": dropout,
        "model.layer_dropout": dropout,
        "model.kernel": kernel,
        "training.epochs": epochs,
        "training.patience": patience,
        "training.optimizer": optimizer,
        "training.learning_rate": learning_rate,
        "training.schedule": schedule,
        "training.clip": clip,
        "training.clip_value": clip_value,
        "training.precision": precision,
        "training.cuda_graph": cuda_graph,
        "training.seed": seed,
    }
    launch(CLASSIFIER, recipe, flags, settings or [], output, resume, overwrite, device)

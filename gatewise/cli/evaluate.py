"""`gatewise evaluate`: score a trained classifier, or write its predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Option(help="Folder of a run, or a model.safetensors.")],
    data: Annotated[
        Path | None, typer.Option(help="A .csv, .parquet or .npz file; default: the test sequences of the run.")
    ] = None,
    labels: Annotated[bool, typer.Option("--labels/--no-labels", help="Whether the file has labels.")] = True,
    predictions: Annotated[Path | None, typer.Option(help="CSV file for the predictions.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the answers: a .png, .svg or .pdf file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file for all scores.")] = None,
    kernel: Annotated[str | None, typer.Option(help="auto, or the name of a kernel.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")] = None,
) -> None:
    """Score a trained classifier on sequences, or write its predictions.

    The columns of the file must be those of the training file.

    \b
    Examples:
      gatewise evaluate --checkpoint runs/classify
      gatewise evaluate --checkpoint runs/classify --data new.csv --plot new.png
      gatewise evaluate --checkpoint runs/classify --data new.csv --no-labels
          --predictions answers.csv
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from rich.console import Console

    from gatewise.cli.classifier_evaluation import evaluate_classifier
    from gatewise.training.processes import join_processes

    with join_processes(device) as processes:
        evaluate_classifier(
            checkpoint,
            data,
            labels,
            predictions,
            plot,
            json_file,
            kernel,
            processes,
            Console(quiet=not processes.first),
        )

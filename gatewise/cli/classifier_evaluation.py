"""Evaluation of a saved classifier on the test sequences of its run, or on other sequences."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.console import Console

from gatewise.cli.classifier_data import batches_of, check_features, files_of, material_of, reading, targets_of
from gatewise.cli.classifier_recipe import ClassifierRecipe
from gatewise.cli.classifier_scores import (
    main_score,
    plot_predictions,
    predictions_of,
    print_scores,
    scores_of,
    write_predictions,
)
from gatewise.cli.option_names import naming
from gatewise.cli.recipe_options import option_names
from gatewise.cli.saved_classifier import SavedClassifier, load_classifier
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.data import Sequences, read_sequences
from gatewise.files import refuse_overwriting, write_bytes
from gatewise.training import RunFolder
from gatewise.training.json_values import to_json
from gatewise.training.pictures import check_picture
from gatewise.training.processes import Processes


def evaluate_classifier(
    checkpoint: Path,
    data: Path | None,
    labels: bool,
    predictions: Path | None,
    plot: Path | None,
    scores_file: Path | None,
    kernel: str | None,
    processes: Processes,
    console: Console,
) -> None:
    """Evaluate a saved classifier: print the scores, and write the requested files.

    Args:
        checkpoint: The folder of a run, or a model file.
        data: The file of sequences; None for the test sequences of the run.
        labels: Whether the file has labels.
        predictions: The CSV file for the predictions.
        plot: The file for the plot; see `check_picture`.
        scores_file: The JSON file for the scores.
        kernel: The kernel of the LSTM; None for the kernel that it was trained with.
        processes: The processes that share the sequences.
        console: The console for the report.

    Raises:
        ArgumentError: There would be no output, or an output file is also an input file.
        CheckpointError: There is no such model.
        DataError: The sequences do not fit the model, or have an unknown label.
    """
    if not labels and (data is None or predictions is None or plot or scores_file):
        expectation = "given with `--data` and `--predictions`, without `--plot` and `--json`"
        raise ArgumentError(
            f"`--no-labels` must be {expectation}: without labels there are predictions, but no scores."
        )
    for name, file in (("predictions", predictions), ("plot", plot), ("json", scores_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ArgumentError(sentence(f"--{name}", "in a folder that exists", str(file), "Create the folder first."))
    outputs = {"--predictions": predictions, "--plot": plot, "--json": scores_file}
    file = RunFolder(checkpoint).model if checkpoint.is_dir() else checkpoint
    refuse_overwriting(outputs, {"--checkpoint": file, "--data": data})
    check_picture("--plot", plot)
    saved = load_classifier(checkpoint, processes.device, kernel)
    if data is None:
        refuse_overwriting(outputs, {f"data.{name}": path for name, path in files_of(saved.data).items()})
    sequences = _sequences(saved, data, labels)
    batches = batches_of(sequences, saved.classes, saved.data, processes)
    predicted = predictions_of(saved.model, batches, processes)
    if predicted is None:
        return
    console.print(f"{sequences.name}: {len(sequences):,} sequences", markup=False, highlight=False, soft_wrap=True)
    if labels:
        targets = targets_of(sequences, saved.classes).numpy()
        scores = scores_of(predicted, targets, saved.classes)
        name, value = main_score(scores)
        console.print(f"[bold]{name} {value:.4f}[/bold]\n", highlight=False)
        print_scores(console, scores)
        if plot is not None:
            plot_predictions(plot, predicted, targets, saved.classes)
        if scores_file is not None:
            write_bytes(scores_file, to_json(scores, indent=2).encode() + b"\n")
    if predictions is not None:
        write_predictions(predictions, sequences, predicted, saved.classes)
    for file in (predictions, plot, scores_file):
        if file is not None:
            console.print(f"written: {file}", markup=False, highlight=False, soft_wrap=True)


def _sequences(saved: SavedClassifier, data: Path | None, labels: bool) -> Sequences:
    if data is None:
        return material_of(saved.data).parts["test"]
    columns = saved.data.columns if data.suffix.lower() == ".npz" else reading(saved.data, saved.features)
    if not labels:
        columns = dataclasses.replace(columns, label="")
    # The columns were named when the classifier was trained, and `evaluate` has no options for them.
    names = {field: f"gatewise train classify {option}" for field, option in option_names(ClassifierRecipe()).items()}
    with naming(names):
        sequences = read_sequences(data, columns, numbers=saved.data.numbers)
    check_features(sequences, saved.features)
    return sequences

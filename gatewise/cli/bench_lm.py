"""`gatewise bench lm`: the PTB language model, with one row for each implementation of its LSTM."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gatewise.benchmarks import language_model, precision, record, report
from gatewise.benchmarks.cases import LANGUAGE_MODELS, QUICK_LANGUAGE_MODEL
from gatewise.cli.bench_run import Bar, Results, Where, device_named, finish, progress_bar
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.files import refuse_overwriting
from gatewise.training.pictures import FILE_OF_PLOT, check_picture


def bench_language_model(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(LANGUAGE_MODELS)}.")] = "large",
    vocabulary: Annotated[list[int] | None, typer.Option(help="Words; repeatable. Default: 10000 and 35000.")] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(precision.PRECISIONS)}; repeatable. Default: all, on a CPU fp32."),
    ] = None,
    way: Annotated[list[str] | None, typer.Option(help="Only rows with this in their name; repeatable.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Probability. Default: the usual one for the size.")] = None,
    train: Annotated[Path | None, typer.Option(help="A text with the tokens. Default: random tokens.")] = None,
    device: Where = "",
    runs: Annotated[int, typer.Option(min=1, help="Samples of each row, taken in turn.")] = 20,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Training steps per sample. Default: 10 on a GPU, 1 on a CPU.")
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Time limit per table in seconds, but at least three samples are taken of each row.")
    ] = 120.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model and few steps, as a test of the command.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help=f"Plot the results: {FILE_OF_PLOT}.")] = None,
    results: Results = record.RESULTS,
) -> None:
    """Train the PTB language model with every implementation of its LSTM, and compare.

    Each row is timed over whole training steps: forward, loss, backward,
    clipping, SGD. Before that, its results are compared with float64, and its
    loss over a few steps with that of torch.nn.LSTM; a row with wrong results
    is red and has no speed, and the command fails.
    """
    where = device_named(device)
    refuse_overwriting({"--plot": plot}, {"--train": train})
    check_picture("--plot", plot)
    if size not in LANGUAGE_MODELS:
        raise ArgumentError(sentence("--size", f"one of {', '.join(LANGUAGE_MODELS)}", repr(size)))
    case = QUICK_LANGUAGE_MODEL if quick else LANGUAGE_MODELS[size]
    if dropout is not None:
        if not 0 <= dropout < 1:
            raise ArgumentError(sentence("--dropout", "a probability in [0, 1)", dropout))
        case = dataclasses.replace(case, dropout=dropout)
    vocabularies = tuple(vocabulary or ([50] if quick else [10_000, 35_000]))
    if min(vocabularies) < 2:
        raise ArgumentError(sentence("--vocabulary", "at least 2 words", min(vocabularies)))
    settings = language_model.Settings(
        case=case,
        vocabularies=vocabularies,
        precisions=tuple(precision.chosen(dtype or [], where)),
        device=where,
        runs=min(runs, 3) if quick else runs,
        calls=calls or (10 if where.type == "cuda" and not quick else 1),
        budget=budget,
        warmups=3 if where.type == "cuda" else 1,
        corpus=train,
        only=tuple(way or ()),
    )
    record.check_writable(results)
    with progress_bar() as progress:
        outcome = language_model.run(settings, Bar(progress))
    path = record.append(outcome.records, results)
    console = Console()
    console.print(report.on_screen(outcome.records))
    if path is not None:
        console.print(f"[dim]Recorded in {path}[/]")
    if plot is not None and outcome.records:
        report.plot(outcome.records, plot)
        console.print(f"[dim]Drawn in {plot}[/]")
    finish(outcome.interrupted, outcome.records)

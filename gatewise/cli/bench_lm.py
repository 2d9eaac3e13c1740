"""`gatewise bench lm`: the PTB language model, one row for every way to compute its LSTM."""

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


def bench_language_model(
    size: Annotated[str, typer.Option(help=f"One of {', '.join(LANGUAGE_MODELS)}.")] = "large",
    vocabulary: Annotated[list[int] | None, typer.Option(help="Words; repeatable. Default: 10000 and 35000.")] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(precision.PRECISIONS)}; repeatable. Default: all, on a CPU fp32."),
    ] = None,
    way: Annotated[list[str] | None, typer.Option(help="Only ways with this in their name; repeatable.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Probability. Default: the classic one of the size.")] = None,
    train: Annotated[Path | None, typer.Option(help="A text to take words from. Default: random tokens.")] = None,
    device: Where = "",
    runs: Annotated[int, typer.Option(min=1, help="Samples of each way, taken in turn.")] = 20,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Training steps a sample. Default: 10 on a GPU, 1 on a CPU.")
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Seconds of a table after which samples end, once there are three of each way.")
    ] = 120.0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few steps: a trial, not a figure.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the run: a .png or .svg file.")] = None,
    results: Results = record.RESULTS,
) -> None:
    """Train the PTB language model with its LSTM computed every way there is, and compare.

    Each row is timed over whole training steps: forward, loss, backward, clip,
    SGD. Before that, what it computes is held against float64, and its loss
    over a few steps against that of torch.nn.LSTM; a row that does not agree
    turns red, gets no speed, and the command fails.
    """
    where = device_named(device)
    refuse_overwriting({"--plot": plot}, {"--train": train})
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

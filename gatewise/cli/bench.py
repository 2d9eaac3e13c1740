"""`gatewise bench`: measure, and write reports from what was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gatewise.benchmarks import language_model, precision, record, report
from gatewise.benchmarks.cases import LANGUAGE_MODELS, QUICK_LANGUAGE_MODEL
from gatewise.contract.errors import ArgumentError, sentence

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure, and write reports from what was measured.")

_INTERRUPTED = 130
_Results = Annotated[Path, typer.Option(help="Folder of the records, JSON lines that are only appended to.")]


@app.command("lm")
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
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1. Default: the GPU when there is one.")] = "",
    runs: Annotated[int, typer.Option(min=1, help="Samples of each way, taken in turn.")] = 20,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Training steps a sample. Default: 10 on a GPU, 1 on a CPU.")
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Seconds of a table after which samples end, once there are three of each way.")
    ] = 120.0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few steps: a trial, not a figure.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the run: a .png or .svg file.")] = None,
    results: _Results = record.RESULTS,
) -> None:
    """Train the PTB language model with its LSTM computed every way there is, and compare.

    Each row is timed over whole training steps: forward, loss, backward, clip,
    SGD. Before that, what it computes is held against float64; a row that does
    not agree turns red and gets no speed.
    """
    where = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
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
    with _progress() as progress:
        outcome = language_model.run(settings, _Bar(progress))
    path = record.append(outcome.records, results)
    console = Console()
    console.print(report.on_screen(outcome.records))
    if path is not None:
        console.print(f"[dim]Recorded in {path}[/]")
    if plot is not None and outcome.records:
        report.plot(outcome.records, plot)
        console.print(f"[dim]Drawn in {plot}[/]")
    if outcome.interrupted:
        console.print("[yellow]Interrupted: these are the rows that were finished.[/]")
        raise typer.Exit(_INTERRUPTED)
    if any(row.status in (record.WRONG, record.FAILED) for row in outcome.records):
        raise typer.Exit(1)


@app.command("report")
def bench_report(
    benchmark: Annotated[str, typer.Argument(help="Which one.")] = language_model.BENCHMARK,
    into: Annotated[
        Path | None, typer.Option(help="A page, such as README.md, whose marked block is filled with the summary.")
    ] = None,
    device: Annotated[str, typer.Option(help="Part of a device's name, such as h200. Default: any.")] = "",
    results: _Results = record.RESULTS,
    reports: Annotated[Path, typer.Option(help="Folder of the generated reports.")] = record.REPORTS,
) -> None:
    """Write the report, the plot and a page's table from the newest run."""
    rows = record.newest(record.read(record.path_of(results, benchmark)), device)
    console = Console()
    reports.mkdir(parents=True, exist_ok=True)
    page = reports / f"{benchmark}.md"
    page.write_text(report.report(rows), encoding="utf-8")
    console.print(f"Wrote {page}")
    if any(row.words_per_second for row in rows):
        report.plot(rows, reports / f"{benchmark}.svg")
        console.print(f"Drew {reports / f'{benchmark}.svg'}")
    if into is not None:
        changed = report.fill_block(into, benchmark, report.markdown(rows))
        console.print(f"{'Filled' if changed else 'Nothing new in'} the block of {into}")


def _device(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ArgumentError(sentence("--device", "cpu, cuda or cuda:N", repr(name)))
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ArgumentError(sentence("--device", f"cpu, or one of {torch.cuda.device_count()} GPUs", repr(name)))
    return torch.device(name)


class _Bar:
    """Shows a run's progress, a table at a time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)
        self._table = ""

    def begin(self, table: str, steps: int) -> None:
        """A table begins."""
        self._table = table
        self._progress.reset(self._task, total=steps, description=table)

    def step(self, doing: str) -> None:
        """One of its steps begins."""
        self._progress.update(self._task, advance=1, description=f"{self._table}: {doing}")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)

"""The parts that the commands of all benchmarks share: the device, progress bars, and the exit status."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gatewise.benchmarks import record
from gatewise.benchmarks.outcome import Outcome
from gatewise.contract.errors import ArgumentError, sentence

Where = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one.")]
Results = Annotated[Path, typer.Option(help="Folder of the records, JSON lines that are only appended to.")]

_INTERRUPTED = 130


class Row(Protocol):
    """A record of any benchmark."""

    @property
    def status(self) -> str:
        """The status: "measured", or the reason why it was not measured."""
        ...


def complete(
    run: Callable[[Bar, Callable[[Any], None]], Outcome[Any]],
    path: Path,
    on_screen: Callable[[list[Any]], RenderableType],
    draw: Callable[[list[Any]], list[Path]],
) -> None:
    """Run a benchmark, append each row to a file as soon as it is measured, and print and draw all rows at the end.

    Args:
        run: A function that runs the benchmark, of the progress bar and a function that records a row, a dataclass.
        path: The file.
        on_screen: A function that returns the report of rows.
        draw: A function that draws rows, if they are to be drawn, and returns the files.
    """
    with progress_bar() as progress:
        outcome = run(Bar(progress), lambda row: record.append_line(dataclasses.asdict(row), path))
    console = Console()
    console.print(on_screen(outcome.records))
    if outcome.records:
        console.print(f"[dim]Recorded in {path}[/]")
    if files := draw(outcome.records):
        console.print(f"[dim]Drawn in {' and '.join(map(str, files))}[/]")
    finish(outcome.interrupted, outcome.records)


def finish(interrupted: bool, rows: Sequence[Row]) -> None:
    """Exit with status 130 if the run was interrupted, 1 if a row is wrong or failed; otherwise return."""
    if interrupted:
        Console().print("[yellow]Interrupted: these are the rows that were finished.[/]")
        raise typer.Exit(_INTERRUPTED)
    if any(row.status in (record.WRONG, record.FAILED) for row in rows):
        raise typer.Exit(1)


def device_named(name: str) -> torch.device:
    """Return the device with the given name.

    Args:
        name: "cpu", "cuda" or "cuda:N"; empty for a GPU if there is one, otherwise the CPU.

    Raises:
        ArgumentError: There is no such device, or it is neither a CPU nor a CUDA device.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ArgumentError(sentence("--device", "cpu, cuda or cuda:N", repr(name)))
    count = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= count:
        advice = f"The GPUs here are cuda:0 to cuda:{count - 1}." if count else "No GPU was found; use cpu."
        raise ArgumentError(sentence("--device", "one that this machine has", repr(name), advice))
    return torch.device(name)


class Bar:
    """The progress of a run, one table at a time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None)
        self._table = ""

    def begin(self, table: str, steps: int) -> None:
        """Start a table with the given number of steps."""
        self._table = table
        self._progress.reset(self._task, total=steps, description=table)

    def step(self, doing: str) -> None:
        """Start a step of the table, with its description."""
        self._progress.update(self._task, advance=1, description=f"{self._table}: {doing}" if self._table else doing)


def progress_bar() -> Progress:
    """Return a progress bar that disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)

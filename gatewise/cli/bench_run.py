"""What every benchmark's command shares: where it runs, how it shows progress, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gatewise.benchmarks import record
from gatewise.contract.errors import ArgumentError, sentence

Where = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one.")]
Results = Annotated[Path, typer.Option(help="Folder of the records, JSON lines that are only appended to.")]

_INTERRUPTED = 130


class Row(Protocol):
    """A record of any benchmark."""

    @property
    def status(self) -> str:
        """Whether it was measured, and otherwise why not."""
        ...


def finish(interrupted: bool, rows: Sequence[Row]) -> None:
    """End the command: 130 when it was interrupted, 1 when a row is wrong or failed."""
    if interrupted:
        Console().print("[yellow]Interrupted: these are the rows that were finished.[/]")
        raise typer.Exit(_INTERRUPTED)
    if any(row.status in (record.WRONG, record.FAILED) for row in rows):
        raise typer.Exit(1)


def device_named(name: str) -> torch.device:
    """Return the device of this name.

    Args:
        name: "cpu", "cuda" or "cuda:N"; empty for the GPU when there is one.

    Raises:
        ArgumentError: There is no such device, or it is of another kind.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ArgumentError(sentence("--device", "cpu, cuda or cuda:N", repr(name)))
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ArgumentError(sentence("--device", f"cpu, or one of {torch.cuda.device_count()} GPUs", repr(name)))
    return torch.device(name)


class Bar:
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
        self._progress.update(self._task, advance=1, description=f"{self._table}: {doing}" if self._table else doing)


def progress_bar() -> Progress:
    """Return what shows progress on the terminal, and nothing of it in the end."""
    columns = (TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)

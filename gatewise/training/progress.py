"""Progress on a terminal: a bar with the remaining time, and one line per evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gatewise.training.history import PERPLEXITY, Evaluation, Measure, Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars


class TerminalProgress:
    """An observer that shows a progress bar and prints one line per evaluation.

    Args:
        console: The console.
        bars: The progress display.
        epochs: The number of epochs of the whole run.
        unit: The unit of tokens, in the plural.
        measure: The format of losses.
    """

    def __init__(self, console: Console, bars: Bars, epochs: int, unit: str, measure: Measure = PERPLEXITY) -> None:
        self._console = console
        self._bars = bars
        self._epochs = epochs
        self._unit = unit
        self._measure = measure
        self._task = bars.add_task(f"epoch 1/{epochs}", total=None, figures="")

    def started(self, step: int, history: Sequence[Evaluation]) -> None:
        """Print the heading, and the evaluations before the run was resumed."""
        self._console.print(heading(self._unit, self._measure), highlight=False)
        for evaluation in history:
            self._console.print(f"[dim]{evaluation_line(evaluation, self._measure)}[/dim]", highlight=False)
        if step:
            self._console.print(f"[dim]resumed after {step:,} steps[/dim]", highlight=False)

    def progressed(self, progress: Progress) -> None:
        """Update the bar."""
        measure = self._measure
        loss = f"{measure.of(progress.loss):,.{measure.digits - 1}f} {measure.short}"
        self._bars.update(
            self._task,
            completed=progress.step,
            total=progress.total_steps,
            description=f"epoch {progress.epoch + 1}/{self._epochs}",
            figures=f"{loss}  {progress.tokens_per_second:,.0f} {self._unit}/s",
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        """Print the evaluation."""
        self._console.print(evaluation_line(evaluation, self._measure), highlight=False)

    def remarked(self, sentence: str) -> None:
        """Print the sentence."""
        self._console.print(sentence, style="dim", markup=False, highlight=False)


def heading(unit: str, measure: Measure = PERPLEXITY) -> str:
    """Return the heading for the lines of `evaluation_line`."""
    train, valid = (f"{part} {measure.short}" for part in ("train", "valid"))
    score = f"{measure.score:>10}" if measure.score else ""
    rate, speed = (10, 14) if score else (12, 16)
    return f"[bold]{'epoch':>7}{train:>12}{valid:>12}{score}{'rate':>{rate}}{f'{unit}/s':>{speed}}{'time':>9}[/bold]"


def evaluation_line(evaluation: Evaluation, measure: Measure = PERPLEXITY) -> str:
    """Return one evaluation in the columns of `heading`; a star marks the best so far."""
    minutes, seconds = divmod(round(evaluation.seconds), 60)
    train, valid = (
        f"{measure.of(loss):,.{measure.digits}f}" for loss in (evaluation.train_loss, evaluation.valid_loss)
    )
    score = f"{evaluation.scores[measure.score]:>10.4f}" if measure.score else ""
    rate, speed = (10, 14) if score else (12, 16)
    return (
        f"{evaluation.epoch:>7.4g}{train:>12}{valid:>12}{score}{evaluation.learning_rate:>{rate}.3g}"
        f"{evaluation.tokens_per_second:>{speed},.0f}{f'{minutes}:{seconds:02d}':>9}"
        f"{'  [green]*[/green]' if evaluation.best else ''}"
    )


@contextlib.contextmanager
def terminal_progress(
    console: Console, epochs: int, unit: str, measure: Measure = PERPLEXITY
) -> Iterator[TerminalProgress]:
    """Show progress inside the context; the bar disappears at its end."""
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Bars(*columns, console=console, transient=True, expand=True) as bars:
        yield TerminalProgress(console, bars, epochs, unit, measure)

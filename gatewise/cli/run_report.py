"""What every run of `gatewise train` says in the same way: which kernel, how it goes, scores beside those expected."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from gatewise.contract.decision import Decision
from gatewise.contract.errors import KernelRefused, TrainingDiverged
from gatewise.nn import LSTM
from gatewise.selection import explain
from gatewise.training import RunFolder
from gatewise.training.history import PERPLEXITY, Measure, perplexity
from gatewise.training.loop import Outcome
from gatewise.training.options import TrainingOptions
from gatewise.training.precision import arithmetic
from gatewise.training.processes import Processes
from gatewise.training.progress import terminal_progress
from gatewise.training.protocols import Observer
from gatewise.training.summaries import TensorBoardSummaries


def field(console: Console, name: str, value: str) -> None:
    """Print one line of a report; the value is markup."""
    console.print(f"[bold]{name:<9}[/bold]{value}", highlight=False)


def decide(layer: LSTM, shape: Sequence[int], precision: str, lengths: bool | None = None) -> Decision:
    """Say which kernel trains a layer; one that was named and refuses is an error before anything is written.

    Args:
        layer: What a batch runs through first, or takes longest in.
        shape: Of a batch in one process, [T, B, I].
        precision: As in `TrainingOptions`.
        lengths: Whether sequences of a batch differ in length.

    Raises:
        KernelRefused: No kernel that may be chosen can train the layer.
    """
    half = torch.bfloat16 if precision == "bfloat16" else None
    with arithmetic(precision):
        decision = explain(layer, tuple(shape), lengths=lengths, dtype=half, training=True)
    if decision.chosen is None:
        raise KernelRefused(f"the kernel {layer.kernel!r} cannot train this model\n\n{decision}")
    return decision


def introduce(console: Console, recipe: Any, lines: Mapping[str, str], decision: Decision) -> None:
    """Print what is about to be trained.

    Args:
        console: Where to.
        recipe: Its name and description head the report.
        lines: What else there is to say, by name, in order; not markup, nothing for those that are empty.
        decision: Which kernel trains the model.
    """
    head = f"{recipe.name}{', ' if recipe.description else ''}{recipe.description}"
    for name, value in {"recipe": head, **lines}.items():
        if value:
            field(console, name, escape(value))
    console.print()
    console.print(escape(str(decision)), soft_wrap=True)
    console.print()


@contextlib.contextmanager
def watching(
    console: Console,
    folder: RunFolder,
    processes: Processes,
    epochs: int,
    unit: str,
    measure: Measure = PERPLEXITY,
    model: nn.Module | None = None,
) -> Iterator[list[Observer]]:
    """Show progress in the terminal and write it for TensorBoard, in the first process.

    Args:
        console: Where progress is shown.
        folder: Of the run.
        processes: This process among those that train together.
        epochs: Of the whole run.
        unit: What training goes through, in the plural.
        measure: How losses are shown.
        model: Whose weights and gradients are written too; None writes none.
    """
    with contextlib.ExitStack() as stack:
        observers: list[Observer] = []
        if processes.first:

            def begun(files: list[Path]) -> None:
                folder.manifest.add(files)
                folder.begun()

            summaries = TensorBoardSummaries(folder.tensorboard, measure, unit, model, begun)
            observers.append(stack.enter_context(contextlib.closing(summaries)))
            observers.append(stack.enter_context(terminal_progress(console, epochs, unit, measure)))
        yield observers


def refuse_divergence(outcome: Outcome, options: TrainingOptions) -> None:
    """Raise if the best validation loss, in nats a token, is so large that there is no perplexity for it.

    Raises:
        TrainingDiverged: The weights are of no use.
    """
    best = min(evaluation.valid_loss for evaluation in outcome.history)
    if not math.isfinite(perplexity(best)):
        raise TrainingDiverged(
            f"the best validation loss is {best:.3g} nats a token, whose perplexity is beyond all numbers: training "
            f"diverged. Lower `learning_rate` (it is {options.learning_rate:g}) or `clip` (it is {options.clip:g}; 0 "
            "does not clip)."
        )


def tell_early_stop(console: Console, outcome: Outcome, options: TrainingOptions) -> None:
    """Print that a run ended before its last epoch, if it did."""
    if outcome.history[-1].epoch < options.epochs:
        field(console, "stopped", f"no better for {options.patience} evaluations")


def compare(
    console: Console,
    expect: Any,
    result: Mapping[str, Any],
    *,
    at_least: Sequence[str] = (),
    at_most: Sequence[str] = (),
) -> None:
    """Print for each score whether it is as expected.

    Args:
        console: Where to.
        expect: The section `[expect]` of a recipe; a limit of 0 expects nothing.
        result: The scores of the run, by name.
        at_least: Scores that must reach their limit.
        at_most: Scores that must not exceed it.
    """
    for name in (*at_least, *at_most):
        limit = getattr(expect, name)
        if limit and name in result:
            reached = result[name] >= limit if name in at_least else result[name] <= limit
            verdict = "[green]reached[/green]" if reached else "[red]missed[/red]"
            demand = f"{name.replace('_', ' ')} at {'least' if name in at_least else 'most'} {limit:g}"
            field(console, "expected", f"{demand}: {verdict} ({result[name]:.4g})")

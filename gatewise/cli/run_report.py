"""The parts of the report that all runs of `gatewise train` share: kernel, progress, and expected scores."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from gatewise.benchmarks.record import Run
from gatewise.contract.decision import Decision
from gatewise.contract.errors import KernelRefused, TrainingDiverged
from gatewise.nn import LSTM
from gatewise.selection import explain
from gatewise.training import RunFolder
from gatewise.training.curves import check_plots
from gatewise.training.history import PERPLEXITY, Measure, perplexity
from gatewise.training.loop import Outcome
from gatewise.training.options import TrainingOptions
from gatewise.training.precision import arithmetic
from gatewise.training.processes import Processes
from gatewise.training.progress import terminal_progress
from gatewise.training.protocols import Observer
from gatewise.training.summaries import TensorBoardSummaries

SHORT = 200
"""The number of steps below which a run that learned nothing is called too short.

The recipe `demo` falls below the perplexity of token frequencies after 80 steps of 157 in an epoch, and the first
translations of `phrases` with a BLEU above 1 come after 180 steps of 276.
"""


def field(console: Console, name: str, value: str) -> None:
    """Print one line of a report; the value is markup."""
    console.print(f"[bold]{name:<9}[/bold]{value}", highlight=False)


def decide(layer: LSTM, shape: Sequence[int], precision: str, lengths: bool | None = None) -> Decision:
    """Return the decision about the kernel that trains a layer, or raise before anything is written.

    Args:
        layer: The layer whose call a batch starts with, or that takes most of the time.
        shape: The shape of a batch in one process, [T, B, I].
        precision: The precision, as in `TrainingOptions`.
        lengths: Whether the sequences of a batch differ in length.

    Raises:
        KernelRefused: No allowed kernel can train the layer.
    """
    half = torch.bfloat16 if precision == "bfloat16" else None
    with arithmetic(precision):
        decision = explain(layer, tuple(shape), lengths=lengths, dtype=half, training=True)
    if decision.chosen is None:
        raise KernelRefused(f"the kernel {layer.kernel!r} cannot train this model\n\n{decision}")
    return decision


def introduce(console: Console, recipe: Any, lines: Mapping[str, str], decision: Decision) -> None:
    """Print what will be trained.

    Args:
        console: The console.
        recipe: The recipe, whose name and description are the heading.
        lines: The other lines by name, in order; they are not markup, and empty ones are not printed.
        decision: The decision about the kernel that trains the model.
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
    """Show progress in the terminal, and log it for TensorBoard, in the first process.

    Args:
        console: The console that shows progress.
        folder: The folder of the run.
        processes: The processes of the distributed training.
        epochs: The number of epochs of the whole run.
        unit: The items that training goes through, in the plural.
        measure: The format of losses.
        model: The model whose weights and gradients are logged too; None to log none.

    Raises:
        MissingExtra: A package of the extra `train` is not installed.
    """
    with contextlib.ExitStack() as stack:
        observers: list[Observer] = []
        if processes.first:
            check_plots()  # a missing package is an error now rather than after the training

            def begun(files: list[Path]) -> None:
                folder.manifest.add(files)
                folder.begun()

            summaries = TensorBoardSummaries(folder.tensorboard, measure, unit, model, begun)
            observers.append(stack.enter_context(contextlib.closing(summaries)))
            observers.append(stack.enter_context(terminal_progress(console, epochs, unit, measure)))
        yield observers


def check_divergence(outcome: Outcome, options: TrainingOptions) -> None:
    """Raise if the best validation loss, in nats per token, is so large that its perplexity overflows.

    Raises:
        TrainingDiverged: The weights are useless.
    """
    best = min(evaluation.valid_loss for evaluation in outcome.history)
    if not math.isfinite(perplexity(best)):
        raise TrainingDiverged(
            f"the best validation loss is {best:.3g} nats per token, whose perplexity overflows: training "
            f"diverged. Lower `learning_rate` (it is {options.learning_rate:g}) or `clip` (it is {options.clip:g}; 0 "
            "does not clip)."
        )


def steps_in_all(options: TrainingOptions, batches: int) -> str:
    """Return the number of optimizer steps of a run, with its epochs.

    Args:
        options: The training options.
        batches: The number of batches of an epoch.
    """
    return f"{options.epochs * batches:,} in {options.epochs:,} epoch{'' if options.epochs == 1 else 's'}"


def note_unlearned(console: Console, outcome: Outcome, options: TrainingOptions, finding: str) -> None:
    """Print that a model learned nothing, and the likely reason.

    Args:
        console: The console.
        outcome: The outcome of the training.
        options: The training options.
        finding: The evidence that the model learned nothing, as the end of a sentence; empty if it learned something.
    """
    if not finding:
        return
    steps, warmup = outcome.step, options.warmup_steps
    advice = "Raise `--epochs`, or give more data."
    if steps <= warmup:
        reason = f"all {steps:,} steps were within the {warmup:,} of `--set training.warmup_steps`"
    elif steps < SHORT:
        reason = f"{steps:,} steps are too few to learn"
    else:
        reason, advice = f"it learned nothing in {steps:,} steps", "Check the data, and try another `--learning-rate`."
    field(console, "[yellow]note[/yellow]     ", f"{finding}: {reason}. {advice}")


def measurements(
    task: str, outcome: Outcome, seconds: float, epochs: int, processes: Processes, measure: Measure = PERPLEXITY
) -> dict[str, Any]:
    """Return the time, the evaluations on the validation data and the environment of a run, for its result.

    Args:
        task: The command under `gatewise train`.
        outcome: The outcome of the training.
        seconds: The time of training and all evaluations.
        epochs: The number of epochs of the recipe, which a run that is resumed may exceed later.
        processes: The processes of the distributed training.
        measure: The format of losses.
    """
    evaluations = [
        {
            "epoch": each.epoch,
            "minutes": each.seconds / 60,
            f"train_{measure.name}": measure.of(each.train_loss),
            f"valid_{measure.name}": measure.of(each.valid_loss),
            **{f"valid_{name.lower()}": score for name, score in each.scores.items()},
        }
        for each in outcome.history
    ]
    run = dataclasses.asdict(Run.now(processes.device))
    return {"task": task, "minutes": seconds / 60, "epochs": epochs, "evaluations": evaluations, "run": run}


def print_early_stop(console: Console, outcome: Outcome, options: TrainingOptions) -> None:
    """Print that a run ended before its last epoch, if it did."""
    if outcome.history[-1].epoch < options.epochs:
        field(console, "stopped", f"no improvement in {options.patience} evaluations")


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
        console: The console.
        expect: The section `[expect]` of a recipe; a limit of 0 means no expectation.
        result: The scores of the run, by name.
        at_least: The scores for which the limit is a lower one.
        at_most: The scores for which the limit is an upper one.
    """
    for name in (*at_least, *at_most):
        limit = getattr(expect, name)
        if limit and name in result:
            reached = result[name] >= limit if name in at_least else result[name] <= limit
            verdict = "[green]reached[/green]" if reached else "[red]missed[/red]"
            demand = f"{name.replace('_', ' ')} at {'least' if name in at_least else 'most'} {limit:g}"
            field(console, "expected", f"{demand}: {verdict} ({result[name]:.4g})")

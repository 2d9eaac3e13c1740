"""`gatewise replay`: repeat a recorded training step that was not finite."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gatewise.contract.errors import CheckpointError
    from gatewise.training import TrainingOptions
    from gatewise.training.recorded_step import RecordedStep
    from gatewise.training.step import Measured

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="The file fault.safetensors of a run.")],
    kernel: Annotated[
        str | None, typer.Option(help="auto, or the name of a kernel.", show_default="the kernel that ran")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: a GPU if there is one.")] = None,
) -> None:
    """Repeat a training step whose loss was not finite, and print its loss and gradients.

    The step is computed on the kernel that ran and on the reference.

    The exit status is 1 if the kernel's loss or gradients are not finite.

    \b
    Examples:
      gatewise replay runs/demo/fault.safetensors
      gatewise replay runs/demo/fault.safetensors --kernel cudnn
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from gatewise.cli.reference import on_reference
    from gatewise.data.pair_batches import PairBatch
    from gatewise.data.sequence_batches import EqualBatch, RaggedBatch
    from gatewise.data.stream import Window
    from gatewise.training.precision import arithmetic
    from gatewise.training.processes import join_processes
    from gatewise.training.recorded_step import read_step
    from gatewise.training.snapshot import load_weights

    with join_processes(device) as processes:
        kinds = (Window, EqualBatch, RaggedBatch, PairBatch)
        steps, weights, facts = read_step(file, processes.device, kinds)
        model = _model(file, facts, kernel, processes.device)
        report = _report(file, facts)
        if not all(isinstance(step.batch, kinds) and "cpu" in step.random for step in steps.values()):
            raise _unknown(file)
        load_weights(model, weights, file)
        contexts = {
            f"kernel {kernel or report.kernel}": contextlib.nullcontext(),
            "reference": on_reference(model),
        }
        finite = True
        typer.echo(f"{report.what}, on {report.device}")
        with arithmetic(report.options.precision):
            for name, context in contexts.items():
                with context:
                    for rank, step in steps.items():
                        found = _measured(model, step, report, processes.device)
                        finite &= found.finite or name == "reference"
                        where = f" of process {rank}" if len(steps) > 1 else ""
                        typer.echo(f"{name:<18} loss {found.loss:g}{where}, gradients {found.gradients:g}")
    if not finite:
        raise typer.Exit(1)


class _Report(NamedTuple):
    """The description of the recorded step in a file.

    Attributes:
        what: The step in words.
        device: The name of the device on which the step ran.
        kernel: The name of the kernel that ran.
        training: Whether it is a training step; otherwise it is a batch of an evaluation.
        options: The training options of the run.
    """

    what: str
    device: str
    kernel: str
    training: bool
    options: TrainingOptions


def _report(file: Path, facts: Any) -> _Report:
    from gatewise.cli.model_file import missing_from
    from gatewise.contract.errors import CheckpointError
    from gatewise.training import TrainingOptions

    try:
        options, kernel = TrainingOptions(**facts["options"]), facts["run"].get("kernel", "auto")
        return _Report(facts["what"], facts["device"], kernel, facts["training"], options)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is not a complete record of a step: {missing_from(error).rstrip('.')}. Give the "
            "fault.safetensors of a run of gatewise train."
        ) from error


def _model(file: Path, facts: Any, kernel: str | None, device: torch.device) -> nn.Module:
    """Build the model of a recorded step."""
    from gatewise.cli.saved_classifier import build_classifier
    from gatewise.cli.saved_model import build_model
    from gatewise.cli.saved_translator import build_translation_model

    builders = {"model": build_model, "translation": build_translation_model, "classifier": build_classifier}
    try:
        saved = facts["model"]
        name = next(name for name in builders if name in saved)
        return builders[name](saved[name] | ({"kernel": kernel} if kernel else {}), device)
    except (KeyError, TypeError, StopIteration) as error:
        raise _unknown(file) from error


def _unknown(file: Path) -> CheckpointError:
    from gatewise.contract.errors import CheckpointError

    return CheckpointError(
        f"{file} is of a model that no command trains. Read it with gatewise.training.recorded_step.read_step."
    )


def _measured(model: nn.Module, step: RecordedStep, report: _Report, device: torch.device) -> Measured:
    """Repeat the step of one process."""
    from gatewise.training.optimizers import build_optimizer
    from gatewise.training.randomness import restore_random_states
    from gatewise.training.step import MeanLoss, Step
    from gatewise.training.validation import measured

    options = report.options
    restore_random_states(step.random, device)
    if not report.training:
        return measured(model, options.precision, device, step.batch, step.state)
    model.train()
    optimizer = build_optimizer(model.parameters(), options)
    whole = Step(MeanLoss(model), optimizer, options.clip, options.precision, device, options.clip_value)
    return whole.measure(step.batch, step.state)

"""From the options of `gatewise train` to a run in a folder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from gatewise.cli.recipe import differences, overridden, parse_settings, read_recipe
from gatewise.contract.errors import ArgumentError
from gatewise.training import RunFolder
from gatewise.training.loop import Outcome
from gatewise.training.processes import Processes, join_processes

RUNS = Path("runs")
INTERRUPTED = 130
_KERNELS = ("model.kernel", "model.attention_kernel")


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Something that `gatewise train` trains.

    Attributes:
        name: The command under `gatewise train`.
        defaults: The recipe when nothing is said.
        run: Trains as a recipe says in a folder, or goes on there.
        section: The section of the recipe that says what to learn from.
        paths: Its keys that are paths.
        named: What may stand there instead of a path.
    """

    name: str
    defaults: Any
    run: Callable[[Any, RunFolder, Processes, Console], Outcome]
    section: str
    paths: tuple[str, ...]
    named: tuple[str, ...]


def launch(
    task: Task,
    recipe_path: Path | None,
    flags: Mapping[str, Any],
    settings: Sequence[str],
    output: Path | None,
    resume: bool,
    overwrite: bool,
    device: str | None,
) -> None:
    """Find recipe and folder, train, and say how to go on.

    Args:
        task: What to train.
        recipe_path: A TOML file, or None for the defaults.
        flags: Options by dotted key; None for those that were not given.
        settings: ``key=value``; they win over `flags`.
        output: The folder; None chooses one under `RUNS`.
        resume: Whether to go on with the run in the folder.
        overwrite: Whether to replace it.
        device: See `join_processes`.

    Raises:
        Exit: The run was interrupted; everything is saved.
    """
    if resume and overwrite:
        raise ArgumentError("`--resume` and `--overwrite` exclude each other. Give one of them.")
    given = {key: value for key, value in flags.items() if value is not None}
    asked = read_recipe(recipe_path, task.defaults) if recipe_path else task.defaults
    asked = _with_absolute_paths(task, overridden(overridden(asked, given), parse_settings(settings)))
    # A run may go on with another kernel: that is how one gets past a kernel that is at fault.
    kernels = {key: value for key, value in given.items() if key in _KERNELS}
    specified = bool(recipe_path or given.keys() - kernels or settings)
    with join_processes(device) as processes:
        folder = RunFolder(Path(processes.told(str(output or _folder_under_runs(asked.name, resume)))))
        recipe = _recipe_to_run(task, asked, specified, kernels, folder, resume, overwrite)
        processes.wait()
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        console = Console(quiet=not processes.first)
        if processes.first and overwrite:
            folder.clear()
        processes.wait()
        outcome = task.run(recipe, folder, processes, console)
        if outcome.interrupted:
            several = f"torchrun --nproc-per-node {processes.count} -m " if processes.count > 1 else ""
            console.print(
                f"\nStopped after {outcome.step:,} steps; everything is saved. Go on with:\n"
                f"  {several}gatewise train {task.name} --output {folder.path} --resume",
                highlight=False,
            )
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _recipe_to_run(
    task: Task,
    asked: Any,
    specified: bool,
    kernels: Mapping[str, str],
    folder: RunFolder,
    resume: bool,
    overwrite: bool,
) -> Any:
    if not folder.exists():
        if resume and not specified:
            raise ArgumentError(
                f"there is no run in {folder.path} to resume. Check `--output`, or leave `--resume` out."
            )
        return asked
    if overwrite:
        return asked
    if not resume:
        raise ArgumentError(
            f"{folder.path} already holds a run. Go on with it by `--resume`, replace it by `--overwrite`, or choose "
            "another `--output`."
        )
    begun = overridden(read_recipe(folder.recipe, task.defaults), kernels)
    if specified and (changed := differences(begun, asked)):
        raise ArgumentError(
            f"the run in {folder.path} was begun with another {', '.join(changed)}. Leave the options out to go on "
            "with it, or choose another `--output`."
        )
    return begun


def _folder_under_runs(name: str, resume: bool) -> Path:
    """Return the newest run of this name to resume, otherwise a folder that does not exist yet."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    newest = RUNS / name
    for each in names:
        if not RunFolder(RUNS / each).exists():
            return newest if resume else RUNS / each
        newest = RUNS / each
    raise AssertionError("names do not end")


def _with_absolute_paths(task: Task, recipe: Any) -> Any:
    """Make the run independent of the folder that it was started in."""
    options = getattr(recipe, task.section)
    paths = {name: getattr(options, name) for name in task.paths}
    absolute = {name: str(Path(path).absolute()) for name, path in paths.items() if path not in ("", *task.named)}
    return dataclasses.replace(recipe, **{task.section: dataclasses.replace(options, **absolute)})

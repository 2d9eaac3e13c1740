"""From the options of `gatewise train` to a run in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from gatewise.cli.failures import print_error, reported
from gatewise.cli.recipe import differences, overridden, parse_settings, read_recipe
from gatewise.contract.errors import ArgumentError, GatewiseError
from gatewise.training import RunFolder
from gatewise.training.loop import Outcome
from gatewise.training.processes import Processes, join_processes

RUNS = Path("runs")
INTERRUPTED = 130
_KERNELS = ("model.kernel", "model.attention_kernel")

_FILES = ("recipe", "checkpoint", "model", "result", "curves", "fault")
"""What every run may write in its folder, as in `RunFolder`."""


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
        files: The files that a run of this command writes beside those of every run, as attributes of `RunFolder`.
        advice: A sentence for users who have too little memory.
    """

    name: str
    defaults: Any
    run: Callable[[Any, RunFolder, Processes, Console], Outcome]
    section: str
    paths: tuple[str, ...]
    named: tuple[str, ...]
    files: tuple[str, ...]
    advice: str


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
        task: The task to train.
        recipe_path: A TOML file, or None for the defaults.
        flags: Options by dotted key; None for those that were not given.
        settings: ``key=value``; they win over `flags`.
        output: The folder; None chooses one under `RUNS`.
        resume: Whether to go on with the run in the folder.
        overwrite: Whether to replace it.
        device: See `join_processes`.

    Raises:
        Exit: With 1 where the folder or the recipe was refused, which has been printed; with 130 where the run was
            interrupted and everything is saved.
    """
    if resume and overwrite:
        raise ArgumentError("`--resume` and `--overwrite` exclude each other. Give one of them.")
    given = {key: value for key, value in flags.items() if value is not None}
    asked = read_recipe(recipe_path, task.defaults) if recipe_path else task.defaults
    asked = _with_absolute_paths(task, overridden(overridden(asked, given), parse_settings(settings)))
    # A run may go on with another kernel: that is how one gets past a kernel that is at fault.
    kernels = {key: value for key, value in given.items() if key in _KERNELS}
    specified = bool(recipe_path or given.keys() - kernels or settings)
    request = _Request(task, asked, specified, kernels, output, resume, overwrite)
    with (
        reported(lambda: task.advice),
        join_processes(device) as processes,
        _opened(request, processes) as opened,
    ):
        outcome = None if opened is None else _trained(task, *opened, processes)
    if outcome is None:
        raise typer.Exit(1)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _trained(task: Task, folder: RunFolder, recipe: Any, processes: Processes) -> Outcome:
    """Train, and say how to go on after an interruption."""
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    console = Console(quiet=not processes.first)
    outcome = task.run(recipe, folder, processes, console)
    if outcome.interrupted:
        several = f"torchrun --nproc-per-node {processes.count} -m " if processes.count > 1 else ""
        console.print(
            f"\nStopped after {outcome.step:,} steps; everything is saved. Go on with:\n"
            f"  {several}gatewise train {task.name} --output {folder.path} --resume",
            highlight=False,
        )
    return outcome


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """What `launch` was asked for.

    Attributes:
        task: The task to train.
        asked: The recipe.
        specified: Whether anything was said about the recipe, apart from kernels.
        kernels: Kernels that were named, by dotted key.
        output: The folder; None chooses one under `RUNS`.
        resume: Whether to go on with the run in the folder.
        overwrite: Whether to replace it.
    """

    task: Task
    asked: Any
    specified: bool
    kernels: Mapping[str, str]
    output: Path | None
    resume: bool
    overwrite: bool


@contextlib.contextmanager
def _opened(request: _Request, processes: Processes) -> Iterator[tuple[RunFolder, Any] | None]:
    """Find the folder and the recipe, and lock the folder, in the first process; tell the others.

    None where that is refused: the first process has said why, and all end without an error of their own.
    """
    held = contextlib.ExitStack()
    folder = recipe = None
    if processes.first:
        try:
            with contextlib.ExitStack() as opening:
                folder, recipe = _claimed(request, opening)
                held = opening.pop_all()
        except GatewiseError as error:
            print_error(str(error))  # before the others hear of it: a launcher ends all as soon as one has ended
    with held:
        path, recipe = processes.told((folder and str(folder.path), recipe))
        yield None if path is None else (folder or RunFolder(path), recipe)


def _claimed(request: _Request, held: contextlib.ExitStack) -> tuple[RunFolder, Any]:
    """Return the folder, locked and ready to be written, and the recipe."""
    folder = _locked_folder(request, held)
    folder.recover()
    recipe = _recipe_to_run(request, folder)
    if request.overwrite:
        held.enter_context(folder.replaced())
    folder.manifest.claim(getattr(folder, name) for name in (*_FILES, *request.task.files))
    return folder, recipe


def _locked_folder(request: _Request, held: contextlib.ExitStack) -> RunFolder:
    """Return the folder that was asked for, or one under `RUNS`: the newest run to resume, otherwise a new one."""
    name = request.asked.name
    if request.output is not None:
        folder = RunFolder(request.output)
    elif request.resume:
        folder = _newest_run(name)
    else:
        numbered = _numbered(name)
        while True:
            folder = next(numbered)
            files = [getattr(folder, each) for each in (*_FILES, *request.task.files)]
            # Another process may begin a run here between the two looks.
            if not _taken(folder, files) and not folder.try_lock():
                held.callback(folder.unlock)
                if not _taken(folder, files):
                    return folder
                held.pop_all().close()
    held.enter_context(folder.locked())
    return folder


def _taken(folder: RunFolder, files: list[Path]) -> bool:
    return folder.exists() or bool(folder.manifest.foreign(files))


def _newest_run(name: str) -> RunFolder:
    """Return the run with the highest number; the first folder when there is none."""
    newest = RunFolder(RUNS / name)
    for folder in _numbered(name):
        if folder.exists():
            newest = folder
        elif not folder.path.exists():
            break
    return newest


def _numbered(name: str) -> Iterator[RunFolder]:
    yield RunFolder(RUNS / name)
    yield from (RunFolder(RUNS / f"{name}-{number}") for number in itertools.count(2))


def _recipe_to_run(request: _Request, folder: RunFolder) -> Any:
    task, asked, specified = request.task, request.asked, request.specified
    resume, overwrite = request.resume, request.overwrite
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
    begun = overridden(read_recipe(folder.recipe, task.defaults), request.kernels)
    if specified and (changed := differences(begun, asked)):
        raise ArgumentError(
            f"the run in {folder.path} was begun with another {', '.join(changed)}. Leave the options out to go on "
            "with it, or choose another `--output`."
        )
    return begun


def _with_absolute_paths(task: Task, recipe: Any) -> Any:
    """Make the run independent of the folder that it was started in."""
    options = getattr(recipe, task.section)
    paths = {name: getattr(options, name) for name in task.paths}
    absolute = {name: str(Path(path).absolute()) for name, path in paths.items() if path not in ("", *task.named)}
    return dataclasses.replace(recipe, **{task.section: dataclasses.replace(options, **absolute)})

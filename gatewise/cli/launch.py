"""From the options of `gatewise train lm` to a run in a folder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gatewise.cli.language_model_run import train_language_model
from gatewise.cli.recipe import (
    PYTHON_TOPICS,
    Recipe,
    differences,
    overridden,
    parse_settings,
    read_recipe,
)
from gatewise.contract.errors import ArgumentError
from gatewise.training import RunFolder
from gatewise.training.processes import join_processes

RUNS = Path("runs")


def launch(
    recipe_path: Path | None,
    flags: Mapping[str, Any],
    settings: Sequence[str],
    output: Path | None,
    resume: bool,
    overwrite: bool,
    device: str | None,
) -> bool:
    """Find recipe and folder, train, and say how to go on.

    Args:
        recipe_path: A TOML file, or None for the defaults.
        flags: Options that were given, by dotted key.
        settings: ``key=value``; they win over `flags`.
        output: The folder; None chooses one under `RUNS`.
        resume: Whether to go on with the run in the folder.
        overwrite: Whether to replace it.
        device: See `join_processes`.

    Returns:
        Whether the run was interrupted.
    """
    if resume and overwrite:
        raise ArgumentError("`--resume` and `--overwrite` exclude each other. Give one of them.")
    asked = read_recipe(recipe_path) if recipe_path else Recipe()
    asked = _with_absolute_paths(overridden(overridden(asked, flags), parse_settings(settings)))
    specified = bool(recipe_path or flags or settings)
    with join_processes(device) as processes:
        folder = RunFolder(Path(processes.told(str(output or _folder_under_runs(asked.name, resume)))))
        recipe = _recipe_to_run(asked, specified, folder, resume, overwrite)
        processes.wait()
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        console = Console(quiet=not processes.first)
        if processes.first and overwrite:
            folder.clear()
        processes.wait()
        outcome = train_language_model(recipe, folder, processes, console)
        if outcome.interrupted:
            console.print(
                f"\nStopped after {outcome.step:,} steps; everything is saved. Go on with:\n"
                f"  gatewise train lm --output {folder.path} --resume",
                highlight=False,
            )
        return outcome.interrupted


def _recipe_to_run(asked: Recipe, specified: bool, folder: RunFolder, resume: bool, overwrite: bool) -> Recipe:
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
    begun = read_recipe(folder.recipe)
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


def _with_absolute_paths(recipe: Recipe) -> Recipe:
    """Make the run independent of the folder that it was started in."""
    text = recipe.text
    paths = {name: getattr(text, name) for name in ("source", "train", "valid", "test")}
    absolute = {name: str(Path(path).absolute()) for name, path in paths.items() if path not in ("", PYTHON_TOPICS)}
    return dataclasses.replace(recipe, text=dataclasses.replace(text, **absolute))

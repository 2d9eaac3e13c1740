"""`gatewise bench quality`: records of complete training runs, made from their folders."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gatewise.benchmarks import quality, record
from gatewise.benchmarks.quality import QualityRecord
from gatewise.cli.bench_run import Results
from gatewise.cli.language_model_run import LANGUAGE_MODEL
from gatewise.cli.launch import Task
from gatewise.cli.nmt_run import TRANSLATION
from gatewise.cli.recipe import read_recipe
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.training import RunFolder

_TASKS = {task.name: task for task in (LANGUAGE_MODEL, TRANSLATION)}
_APART = ("sample", "expect", "description")
"""The keys of a recipe that do not change what is trained."""


def bench_quality(
    folders: Annotated[list[Path], typer.Argument(help="Folders of complete runs of gatewise train lm or nmt.")],
    results: Results = record.RESULTS,
) -> None:
    """Record the scores and the time of complete training runs, one line for each run.

    \b
    Examples:
      gatewise train lm --recipe wikitext2-awd-lstm --seed 1 --output runs/1
      gatewise train lm --recipe wikitext2-awd-lstm --seed 2 --output runs/2
      gatewise bench quality runs/1 runs/2
      gatewise bench report quality --into docs/training.md
    """  # noqa: D301 - \b keeps the lines of the examples apart
    record.check_writable(results)
    rows = [quality_record(RunFolder(folder)) for folder in folders]
    path = record.path_of(results, quality.BENCHMARK)
    for row in rows:
        record.append_line(dataclasses.asdict(row), path)
    console = Console()
    for row in rows:
        scores = f"validation {row.figure('valid'):.2f}, test {row.figure('test'):.2f}"
        console.print(f"{row.recipe}, seed {row.seed}: {scores}, {row.minutes:.2f} minutes", highlight=False)
    console.print(f"[dim]Recorded in {path}[/]")


def quality_record(folder: RunFolder) -> QualityRecord:
    """Return the record of a complete run.

    Raises:
        ArgumentError: The folder contains no complete run of `gatewise train lm` or `gatewise train nmt`.
    """
    try:
        found = _record(json.loads(folder.result.read_text("utf-8")), folder)
        scores = [line[f"valid_{quality.SCORES[found.task]}"] for line in found.evaluations]
        if not all(map(math.isfinite, [*scores, found.figure("valid"), found.figure("test"), found.minutes])):
            raise ValueError("a score or the time is not finite")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expectation = "folders of complete runs of gatewise train lm or nmt with finite scores"
        got = f"{folder.path}, whose {folder.result.name} is missing or incomplete"
        raise ArgumentError(sentence("FOLDERS", expectation, got, "Resume the run, or train it again.")) from error
    return found


def defaults_of_recipes() -> dict[str, dict[str, Any]]:
    """Return the settings of a recipe without values, by task, as records have them."""
    found = {name: _settings(task, dataclasses.asdict(task.defaults)) for name, task in _TASKS.items()}
    return json.loads(json.dumps(found))


def _settings(task: Task, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe without its name, its seed, paths, and what does not change what is trained."""
    left_out = {"training": ("seed",), task.section: task.paths}
    return {
        name: {key: each for key, each in value.items() if key not in left_out.get(name, ())}
        if isinstance(value, dict)
        else value
        for name, value in values.items()
        if name not in ("name", *_APART)
    }


def _record(result: dict[str, Any], folder: RunFolder) -> QualityRecord:
    task = _TASKS[result.pop("task")]
    values: dict[str, Any] = dataclasses.asdict(read_recipe(folder.recipe, task.defaults))
    if result.pop("epochs") != values["training"]["epochs"]:
        raise ValueError("the result is that of the run before it was resumed to more epochs")
    return QualityRecord(
        benchmark=quality.BENCHMARK,
        task=task.name,
        recipe=values["name"],
        seed=values["training"]["seed"],
        settings=_settings(task, values),
        run=record.Run(**result.pop("run")),
        evaluations=result.pop("evaluations"),
        minutes=result.pop("minutes"),
        figures={name: value for name, value in result.items() if isinstance(value, float)},
    )

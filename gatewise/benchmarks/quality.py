"""Time to quality: the score that a recipe reaches, and the time that it takes, as records and as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gatewise.benchmarks.provenance import provenance
from gatewise.benchmarks.record import Run, of_device

BENCHMARK = "quality"

SCORES = {"lm": "perplexity", "nmt": "bleu"}
"""The score of each command under `gatewise train` that has records."""

HEADINGS = {"perplexity": "perplexity", "bleu": "BLEU"}
"""The names of scores as they are shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class QualityRecord:
    """One complete training run.

    Attributes:
        benchmark: The name of the benchmark.
        task: The command under `gatewise train`.
        recipe: The name of the recipe.
        seed: The seed.
        settings: All other values of the recipe, by section, without paths.
        minutes: The time of training, validation, checkpoints and the evaluation on the test data.
        figures: The scores by name.
        evaluations: The evaluations on the validation data, with the minutes until then.
        run: The environment of the training.
    """

    benchmark: str
    task: str
    recipe: str
    seed: int
    settings: dict[str, Any]
    minutes: float
    figures: dict[str, float]
    evaluations: list[dict[str, float]]
    run: Run

    def figure(self, split: str) -> float:
        """Return the score on the validation ("valid") or the test data ("test")."""
        return self.figures[f"{split}_{SCORES[self.task]}"]

    @classmethod
    def from_line(cls, line: str) -> QualityRecord:
        """Parse one line of a file."""
        fields = json.loads(line)
        return cls(**fields | {"run": Run(**fields["run"])})


def newest(
    records: Sequence[QualityRecord], device: str = "", defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> list[QualityRecord]:
    """Return the newest record of each task, recipe, device and seed, without those of a recipe that was changed since.

    Args:
        records: All records of a file, oldest first.
        device: A part of the device's name, as for `of_device`; with "" the records of all devices are returned.
        defaults: The settings of a recipe without values, by task. A record that is older than an option lacks it, and
            was trained with its default.
    """
    fitting = of_device(records, device) if device else list(records)

    def settings_of(each: QualityRecord) -> dict[str, Any]:
        return _completed(each.settings, (defaults or {}).get(each.task, {}))

    settings = {(each.task, each.recipe): settings_of(each) for each in fitting}
    current = {
        (each.task, each.recipe, each.run.device, each.seed): each
        for each in fitting
        if settings_of(each) == settings[each.task, each.recipe]
    }
    return [current[key] for key in sorted(current)]


def markdown(records: Sequence[QualityRecord]) -> str:
    """Return a table in Markdown with a row for each recipe and device: means over seeds, with lowest and highest."""
    lines = ["| recipe | device | score | validation | test | minutes | seeds |", "|---|---|---|---:|---:|---:|---|"]
    for task, recipe, device in dict.fromkeys((each.task, each.recipe, each.run.device) for each in records):
        rows = [each for each in records if (each.task, each.recipe, each.run.device) == (task, recipe, device)]
        scores = [_spread([each.figure(split) for each in rows], 1) for split in ("valid", "test")]
        minutes = _spread([each.minutes for each in rows], 2)
        seeds = ", ".join(str(each.seed) for each in rows)
        heading = HEADINGS[SCORES[task]]
        lines.append(f"| `{recipe}` | {device} | {heading} | {scores[0]} | {scores[1]} | {minutes} | {seeds} |")
    origin = provenance([each.run for each in records], sampled=False)
    return "\n".join([*lines, "", origin])


def report(records: Sequence[QualityRecord]) -> str:
    """Return the table, and then the validation score of every evaluation of every run."""
    parts = ["# `gatewise bench quality`", "", markdown(records)]
    for each in records:
        score = f"valid_{SCORES[each.task]}"
        parts += ["", f"## {each.recipe}, seed {each.seed}, {each.run.device}", "", f"`{each.run.command}`", ""]
        parts += ["| epoch | minutes | validation |", "|---:|---:|---:|"]
        parts += [f"| {line['epoch']:g} | {line['minutes']:.2f} | {line[score]:.2f} |" for line in each.evaluations]
    return "\n".join(parts) + "\n"


def _completed(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by section, with the defaults of those that are missing."""
    sections = {
        name: _completed(each, defaults.get(name, {})) for name, each in settings.items() if isinstance(each, dict)
    }
    return {**defaults, **settings, **sections}


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"

"""`gatewise train`: train a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from gatewise.cli import run_options
from gatewise.cli.classify import classify
from gatewise.cli.nmt import nmt
from gatewise.cli.recipe import Recipe
from gatewise.cli.recipe_options import recipe_options

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train a model.")
app.command("classify")(classify)
app.command("nmt")(nmt)


@app.callback()
def train() -> None:
    """Train a language model, a classifier of sequences, or a translation model."""


@app.command("lm")
@recipe_options(Recipe())
def language_model(
    recipe: run_options.Recipe = None,
    settings: run_options.Settings = None,
    output: run_options.Output = None,
    resume: run_options.Resume = False,
    overwrite: run_options.Overwrite = False,
    device: run_options.Device = None,
    *,
    given: Mapping[str, Any],
) -> None:
    """Train a language model on text, compute its score, and generate a sample.

    Without any options, it trains on the help pages of Python, for a few minutes.

    Ctrl-C saves the run, and --resume continues it; on a CPU, the results are bitwise those of an uninterrupted run.

    \b
    Examples:
      gatewise train lm
      gatewise train lm --text book.txt --tokens character
      gatewise train lm --recipe demo --set training.epochs=3
      gatewise train lm --output runs/demo --resume
      torchrun --nproc-per-node 2 -m gatewise train lm --text book.txt
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from gatewise.cli.language_model_run import LANGUAGE_MODEL
    from gatewise.cli.launch import launch

    launch(LANGUAGE_MODEL, recipe, given, settings or [], output, resume, overwrite, device)

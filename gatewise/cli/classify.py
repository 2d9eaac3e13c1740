"""`gatewise train classify`: train a classifier or regressor of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gatewise.cli import run_options
from gatewise.cli.classifier_recipe import ClassifierRecipe
from gatewise.cli.recipe_options import recipe_options


@recipe_options(ClassifierRecipe())
def classify(
    recipe: run_options.Recipe = None,
    settings: run_options.Settings = None,
    output: run_options.Output = None,
    resume: run_options.Resume = False,
    overwrite: run_options.Overwrite = False,
    device: run_options.Device = None,
    *,
    given: Mapping[str, Any],
) -> None:
    """Train an LSTM that predicts the class of a sequence, or a number.

    Without any options, it learns to read scikit-learn's digits row by row, in less than a minute.

    Tables have one row per time step; .npz files have the arrays x, lengths and y.

    \b
    Examples:
      gatewise train classify
      gatewise train classify --data synthetic --pooling last
      gatewise train classify --data steps.csv --label-column kind
      gatewise train classify --data pumps.parquet --task regression
      gatewise train classify --output runs/classify --resume
      gatewise evaluate --checkpoint runs/classify
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from gatewise.cli.classifier_run import CLASSIFIER
    from gatewise.cli.launch import launch

    launch(CLASSIFIER, recipe, given, settings or [], output, resume, overwrite, device)

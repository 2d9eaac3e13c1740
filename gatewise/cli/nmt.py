"""`gatewise train nmt`: train an encoder-decoder with attention for translation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gatewise.cli import run_options
from gatewise.cli.nmt_recipe import TranslationRecipe
from gatewise.cli.recipe_options import recipe_options


@recipe_options(TranslationRecipe())
def nmt(
    recipe: run_options.Recipe = None,
    settings: run_options.Settings = None,
    output: run_options.Output = None,
    resume: run_options.Resume = False,
    overwrite: run_options.Overwrite = False,
    device: run_options.Device = None,
    *,
    given: Mapping[str, Any],
) -> None:
    """Train an LSTM encoder and decoder with attention for translation.

    Without any options, it learns to translate German dates and amounts to
    English, in about two minutes on two CPU cores.

    Line n of one file is the translation of line n of the other. Give two
    files, which are split into training, validation and test pairs, or all six.

    \b
    Examples:
      gatewise train nmt
      gatewise train nmt --from fr --to iso
      gatewise train nmt --train-source news.de --train-target news.en
      gatewise train nmt --recipe phrases --set epochs=4
      gatewise train nmt --memory-budget 8GB
      gatewise train nmt --output runs/nmt --resume
      gatewise translate --checkpoint runs/nmt
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from gatewise.cli.launch import launch
    from gatewise.cli.nmt_run import TRANSLATION

    launch(TRANSLATION, recipe, given, settings or [], output, resume, overwrite, device)

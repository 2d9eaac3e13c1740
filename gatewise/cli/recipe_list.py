"""`gatewise recipes`: list the recipes that come with gatewise, or print one."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def recipes(
    name: Annotated[str, typer.Argument(help="The recipe to print as TOML; default: list them all.")] = "",
) -> None:
    """List the recipes that are part of gatewise, or print one of them.

    A recipe is a TOML file with all settings of a run of gatewise train.

    \b
    Examples:
      gatewise recipes
      gatewise train lm --recipe demo
      gatewise recipes demo > mine.toml
      gatewise train lm --recipe mine.toml
    """  # noqa: D301 - \b keeps the lines of the examples apart
    from gatewise.cli.recipe_files import recipe_files, recipe_named

    if name:
        typer.echo(recipe_named(name).path.read_text("utf-8"), nl=False)
        return
    for recipe in recipe_files():
        typer.echo(f"{recipe.command}\n{textwrap.indent(recipe.summary, '    ')}")

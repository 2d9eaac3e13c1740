"""The recipes that come with gatewise, and the files that `--recipe` names."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import NamedTuple

from gatewise.contract.errors import ArgumentError, sentence

FOLDER = Path(__file__).with_name("recipes")
"""The recipes, in one folder for each command under `gatewise train`."""


class RecipeFile(NamedTuple):
    """A recipe that comes with gatewise.

    Attributes:
        task: The command under `gatewise train` that runs it.
        name: The name, which is that of the file without its suffix.
        path: The file.
    """

    task: str
    name: str
    path: Path

    @property
    def command(self) -> str:
        """The command that runs the recipe."""
        return f"gatewise train {self.task} --recipe {self.name}"

    @property
    def summary(self) -> str:
        """The description, and in a second line the longest expected duration with its device."""
        document = tomllib.loads(self.path.read_text("utf-8"))
        minutes, device = (document["expect"][key] for key in ("minutes", "on"))
        return f"{document['description']}\nat most {minutes:g} minute{'' if minutes == 1 else 's'} on {device}"


def recipe_files() -> list[RecipeFile]:
    """Return all recipes that come with gatewise, in alphabetical order of tasks and names."""
    return [RecipeFile(path.parent.name, path.stem, path) for path in sorted(FOLDER.glob("*/*.toml"))]


def recipe_named(name: str) -> RecipeFile:
    """Return the recipe of the given name.

    Raises:
        ArgumentError: No recipe that comes with gatewise has the name.
    """
    known = {recipe.name: recipe for recipe in recipe_files()}
    if name not in known:
        raise ArgumentError(sentence("NAME", f"one of {', '.join(known)}", repr(name)))
    return known[name]


def recipe_path(task: str, recipe: str) -> Path:
    """Return the file that `--recipe` names: an existing file, otherwise a recipe that comes with gatewise.

    Args:
        task: The command under `gatewise train`.
        recipe: The path of a TOML file, or the name of a recipe.

    Raises:
        ArgumentError: There is neither a file nor a recipe of this name, or the recipe is one of another command.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    known = {each.name: each for each in recipe_files()}
    if recipe in known and known[recipe].task != task:
        expectation = f"a recipe of `gatewise train {task}`"
        raise ArgumentError(sentence("--recipe", expectation, repr(recipe), f"Run: {known[recipe].command}"))
    if recipe in known:
        return known[recipe].path
    names = [name for name, each in known.items() if each.task == task]
    close = difflib.get_close_matches(path.stem, names, n=1)
    advice = f"Did you mean {close[0]}?" if close else "Check the path. The command `gatewise recipes` lists the names."
    raise ArgumentError(sentence("--recipe", f"a TOML file or one of {', '.join(names)}", repr(recipe), advice))

"""Command-line options generated from the fields of a recipe."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from gatewise.cli.application import command_named
from gatewise.cli.classifier_recipe import ClassifierRecipe
from gatewise.cli.nmt_recipe import TranslationRecipe
from gatewise.cli.recipe import Recipe, overridden
from gatewise.cli.recipe_options import option_names, recipe_options
from gatewise.contract.errors import ArgumentError
from gatewise.contract.option import Option
from gatewise.contract.ranges import COUNT

COMMANDS = {"lm": Recipe(), "nmt": TranslationRecipe(), "classify": ClassifierRecipe()}


@dataclasses.dataclass(frozen=True)
class Shelf:
    width: Annotated[int, COUNT, Option("The width in books.", also=("depth",))] = 30
    depth: int = 30
    wood: Annotated[str, Option("beech or oak.", name="--of")] = "oak"
    open: Annotated[bool, Option("Leave it without doors.")] = True
    books: Annotated[tuple[str, ...], Option("A title.", name="--book", metavar="TITLE")] = ()
    price: float = 1.5


@dataclasses.dataclass(frozen=True)
class Order:
    number: Annotated[int, Option("How many shelves.")] = 1
    sender: Annotated[str, Option("Who sends it.", panel="People")] = ""
    shelf: Shelf = Shelf()


def called(*words, keys=()):
    """Call a command with an option of its own and those of a recipe; return its arguments and its output."""
    app, seen = typer.Typer(), []

    @app.command()
    @recipe_options(Order(), *keys)
    def order(urgent: Annotated[bool, typer.Option("--urgent")] = False, *, given: dict) -> None:
        """Order shelves."""
        seen.append((urgent, given))

    answer = CliRunner(env={"COLUMNS": "80"}).invoke(app, list(map(str, words)), catch_exceptions=False)
    return seen, answer.output


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ((), {}),
        (("--number", 1), {"number": 1}),  # the default too, for a recipe may say otherwise
        (("--width", 8), {"shelf.width": 8, "shelf.depth": 8}),
        (("--of", "", "--no-open"), {"shelf.wood": "", "shelf.open": False}),
        (("--book", "a, b", "--book", "ü"), {"shelf.books": ["a, b", "ü"]}),
    ],
)
def test_a_command_gets_the_options_that_were_given_and_no_others(words, given):
    assert called(*words, "--urgent")[0] == [(True, given)]


@pytest.mark.parametrize("words", [("--depth", 3), ("--price", 3), ("--wood", "oak"), ("--width", "wide")])
def test_other_words_are_usage_errors(words):
    seen, printed = called(*words)
    assert not seen
    assert words[0] in printed


def test_the_help_has_every_option_with_its_default_in_the_panel_of_its_section():
    printed = called("--help")[1]
    panels = {part.split(" ─")[0]: part for part in printed.split("╭─ ")[1:]}
    assert set(panels) == {"Options", "Shelf", "People", "Run"}
    for words in ("--width", "The width in books. [default: 30]", "--of", "--no-open", "[default: open]", "TITLE"):
        assert words in panels["Shelf"]
    assert "Who sends it. " in panels["People"]
    assert "How many shelves. [default: 1]" in panels["Run"]
    assert "--depth" not in printed


def test_only_the_options_that_are_named_are_made():
    assert called("--number", 2, "--of", "elm", keys=("number", "shelf.wood"))[0] == [
        (False, {"number": 2, "shelf.wood": "elm"})
    ]
    assert not called("--width", 2, keys=("number", "shelf.wood"))[0]


def options():
    for name, recipe in COMMANDS.items():
        for option in command_named("gatewise.cli.train").commands[name].params:
            section, _, field = option.name.rpartition("__")
            holder = getattr(recipe, section) if section else recipe
            if dataclasses.is_dataclass(holder) and hasattr(holder, field):
                yield pytest.param(name, recipe, option, getattr(holder, field), id=f"{name} {option.opts[0]}")


@pytest.mark.parametrize(("name", "recipe", "option", "default"), list(options()))
def test_every_option_of_training_changes_its_key_and_no_other(gatewise, monkeypatch, name, recipe, option, default):
    asked = []
    monkeypatch.setattr("gatewise.cli.launch.launch", lambda task, path, given, *others: asked.append(given))
    if isinstance(default, bool):
        words, value = [option.secondary_opts[0] if default else option.opts[0]], not default
    elif isinstance(default, tuple):
        words, value = [option.opts[0], "a"], ["a"]
    else:
        value = {int: 7, float: 0.5, str: "7"}[type(default)]
        words = [option.opts[0], value]
    assert gatewise("train", name, *words).status == 0
    (given,) = asked
    assert given.pop(option.name.replace("__", ".")) == value
    assert set(given) <= {"model.embedding_dropout", "model.layer_dropout"}
    assert all(each == value for each in given.values())


def test_there_are_options_of_all_sections():
    sections = {option.values[2].name.rpartition("__")[0] for option in options()}
    assert sections == {"", "text", "data", "model", "training", "translation"}


@pytest.mark.parametrize("recipe", COMMANDS.values(), ids=COMMANDS)
def test_every_field_has_an_option_or_is_set_by_its_key(recipe):
    names = option_names(recipe)
    for field, option in names.items():
        if option.startswith("--set "):
            assert overridden(recipe, {option.removeprefix("--set "): value_of(recipe, field)}) == recipe
    assert {name for name in names.values() if not name.startswith("--set ")} == {
        option.values[2].opts[0] for option in options() if option.values[1] is recipe
    }


def value_of(recipe, field):
    holders = [recipe, *(getattr(recipe, each.name) for each in dataclasses.fields(recipe))]
    return next(getattr(holder, field) for holder in holders if hasattr(holder, field))


def test_libraries_name_fields_and_the_command_line_options(gatewise, tmp_path):
    with pytest.raises(ArgumentError, match=r"^`learning_rate` must be greater than 0, got -1\.0"):
        overridden(Recipe(), {"learning_rate": -1})
    for words in (["--learning-rate", -1], ["--set", "learning_rate=-1"]):
        answer = gatewise("train", "lm", *words)
        assert answer.refused
        assert answer.err == "error: `--learning-rate` must be greater than 0, got -1.0.\n"
    (tmp_path / "mine.toml").write_text("[training]\nlearning_rate = -1\n")
    answer = gatewise("train", "lm", "--recipe", "mine.toml")
    assert answer.err == "error: mine.toml: `training.learning_rate` must be greater than 0, got -1.0.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "lm", "--set", "warmup_steps=-1"], "`--set training.warmup_steps` must be 0 or more, got -1."),
        (["train", "lm", "--train", "a"], "`--train`, `--valid`, `--test` must be three files, got only `--train`."),
        (["train", "nmt", "--set", "name=a/b"], "`--set name` must be a plain folder name"),
        (["explain", "nmt", "--hidden-size", 0], "`--hidden-size` must be a positive integer, got 0."),
        (["explain", "--input", "3,4,5", "--hidden", 0], "`--hidden` must be a positive integer, got 0."),
        (["explain", "--input", "3,4,5", "--hidden", 8, "--layers", 0], "`--layers` must be a positive integer"),
        (
            ["explain", "--input", "3,4,5", "--hidden", 8, "--proj", 9],
            "`--proj` must be 0 or more, and less than `--hidden` 8",
        ),
        (["generate", "--checkpoint", "run", "--top-p", 2], "`--top-p` must be in (0, 1], got 2.0."),
    ],
)
def test_errors_name_the_options(gatewise, words, message):
    answer = gatewise(*words)
    assert answer.refused
    assert message in " ".join(answer.err.split())

"""Numbers must be finite and in range, in a recipe, in `--set`, and in an option."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing

import numpy as np
import pytest
import typer

from gatewise.cli import COMMANDS
from gatewise.cli.application import command_named
from gatewise.cli.classifier_recipe import ClassifierRecipe
from gatewise.cli.nmt_recipe import TranslationRecipe
from gatewise.cli.recipe import Recipe, overridden
from gatewise.contract.errors import ArgumentError
from gatewise.contract.ranges import COUNT, POSITIVE, PROBABILITY, SHARE, Range
from gatewise.models import Search
from gatewise.models.decoding import check_sampling

RECIPES = (Recipe(), ClassifierRecipe(), TranslationRecipe())


def numbers(recipe):
    """Return the dotted keys of a recipe's numbers."""
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        inner = (
            [(f"{field.name}.{key}", each) for key, each in numbers(value)] if dataclasses.is_dataclass(value) else []
        )
        yield from inner
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield field.name, value


NUMBERS = [(recipe, key, type(value)) for recipe in RECIPES for key, value in numbers(recipe)]


@pytest.mark.parametrize(
    ("recipe", "key", "kind"), NUMBERS, ids=lambda each: each if isinstance(each, str) else type(each).__name__
)
def test_every_number_of_a_recipe_has_a_range(recipe, key, kind):
    name = key.rpartition(".")[2]
    for value in (math.nan, math.inf, -math.inf) if kind is float else (-1, -(10**30), 10**30):
        with pytest.raises(ArgumentError, match=f"`{name}` must be "):
            overridden(recipe, {key: value})


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        (COUNT, (1, 2**31 - 1), (0, -1, 2**31, math.nan)),
        (POSITIVE, (1e-300, 1e300), (0.0, -1.0, math.inf, math.nan)),
        (PROBABILITY, (0.0, 0.999), (1.0, -0.1, math.nan, np.float32("nan"))),
        (SHARE, (0.001, 1.0), (0.0, 1.001, math.nan)),
        (Range("a finite number"), (-1e308, 0, 1e308), (math.inf, -math.inf, math.nan)),
    ],
)
def test_a_range_holds_its_limits(limits, inside, outside):
    for value in inside:
        limits.check("x", value)
    for value in outside:
        with pytest.raises(ArgumentError, match=r"^`x` must be .*, got "):
            limits.check("x", value)


def test_what_is_too_large_for_the_machine_is_told_the_limit():
    with pytest.raises(ArgumentError, match=r"`x` must be at most 2,147,483,647, got 2147483648"):
        COUNT.check("x", 2**31)


@pytest.mark.parametrize(
    "name", ["../../evil", "/tmp/evil", "a/b", "a\\b", "..", ".", "", " ", "a\nb", "C:x", "x" * 201]
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: type(each).__name__)
def test_a_name_is_that_of_a_folder(recipe, name):
    with pytest.raises(ArgumentError, match=r"`name` must be a plain folder name, without / and \\, got "):
        overridden(recipe, {"name": name})


@pytest.mark.parametrize("name", ["lm", "wikitext2-medium", "my run 2", "é", ".hidden", "a..b", "v1.0"])
def test_a_plain_name_is_taken(name):
    assert overridden(Recipe(), {"name": name}).name == name


def test_a_name_in_a_recipe_writes_nowhere_else(gatewise, small, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "evil.toml").write_text('name = "../../evil"\n')
    answer = gatewise("train", "lm", *small, "--recipe", "evil.toml")
    assert answer.status == 1
    assert "`the key name` must be a plain folder name, without / and \\, got '../../evil'." in answer.err
    assert {each.name for each in tmp_path.iterdir()} == {"work", "evil.toml", "cats.txt"}
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_drawing_and_searching_refuse_what_is_no_number(value):
    with pytest.raises(ArgumentError, match="`temperature` must be "):
        check_sampling(value, None, None)
    with pytest.raises(ArgumentError, match="`top_p` must be "):
        check_sampling(1.0, None, value)
    with pytest.raises(ArgumentError, match="`length_penalty` must be "):
        Search(0, 1, length_penalty=11 * value)


def options():
    """Return all numeric options of all commands: the words, the option, and whether it is a floating-point number."""

    def of(command, words):
        for name, inner in getattr(command, "commands", {}).items():
            yield from of(inner, (*words, name))
        hints = typing.get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}
        for option in command.params:
            kinds = {float, int} & {hints[option.name], *leaves(hints[option.name])} if option.name in hints else set()
            if kinds:
                yield (*words, option.opts[0]), (option, float in kinds)

    for each in COMMANDS:
        yield from of(command_named(each.module), (each.name,))


def leaves(hint):
    """Return the types in annotations such as `list[int] | None`."""
    for inner in typing.get_args(hint):
        yield inner
        yield from leaves(inner)


OPTIONS = dict(options())


def test_there_are_options_of_both_kinds():
    assert {floating for _, floating in OPTIONS.values()} == {True, False}
    assert len(OPTIONS) > 50


@pytest.mark.parametrize("words", OPTIONS, ids=" ".join)
def test_every_option_refuses_what_no_machine_can_count(words):
    option, floating = OPTIONS[words]
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    for text in ("nan", "inf", "-inf", "1e999") if floating else (str(2**63), str(-(2**64))):
        with pytest.raises(typer.BadParameter):
            option.process_value(context, [text] if option.multiple else text)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--checkpoint", "absent", "--temperature", "nan"),
        ("translate", "--checkpoint", "absent", "--length-penalty", "nan"),
        ("train", "lm", "--learning-rate", "inf"),
        ("train", "nmt", "--ratio", "nan"),
        ("explain", "--input", "3,2,4", "--hidden", "4", "--dropout", "nan"),
        ("bench", "lm", "--quick", "--budget", "nan"),
        ("generate", "--checkpoint", "absent", "--seed", 2**63),
    ],
)
def test_an_option_that_is_no_number_is_a_usage_error(gatewise, words):
    answer = gatewise(*words)
    assert answer.status == 2
    assert f"Invalid value for '{words[-2]}'" in answer.err
    assert any(reason in answer.err for reason in ("is not a finite", "is too large"))


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("generate", "--checkpoint", "absent", "--prompt", "caf\udce9"), "--prompt"),
        (("train", "lm", "--text", "caf\udce9.txt"), "--text"),
        (("train", "lm", "--set", "sample.prompt=caf\udce9"), "--set"),
        (("train", "classify", "--data", "caf\udce9.csv"), "--data"),
    ],
)
def test_text_that_is_not_utf8_is_a_usage_error(gatewise, words, option):
    answer = gatewise(*words)
    assert answer.status == 2
    assert f"Invalid value for '{option}': '{ascii(words[-1])[1:-1]}' is not UTF-8." in " ".join(
        answer.err.replace("│", "").split()
    )


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("train", "lm", "--output", ""), "--output"),
        (("generate", "--checkpoint", ""), "--checkpoint"),
        (("convert", "lstm.npz", "", "--from", "torch"), "TARGET"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(gatewise, words, option):
    answer = gatewise(*words)
    assert answer.status == 2
    assert f"Invalid value for '{option}': '' is no path; the current folder is '.'." in answer.err


@pytest.mark.parametrize(
    "words",
    [
        *(("lm", option, "") for option in ("--text", "--train", "--valid")),
        ("lm", "--set", "text.source="),
        *(("classify", option, "") for option in ("--data", "--test")),
        *(("nmt", option, "") for option in ("--data", "--train-source")),
    ],
    ids=" ".join,
)
def test_data_of_no_name_is_not_other_data(gatewise, words):
    answer = gatewise("train", *words, "--output", "run")
    assert answer.refused
    option = "--text" if "--set" in words else words[1]
    assert f"`{option}` must be a path or a name, got ''. Leave it out for the data of the recipe." in answer.err


def test_a_folder_whose_path_is_not_utf8_is_refused(gatewise, small):
    answer = gatewise("train", "lm", *small, "--output", "caf\udce9")
    assert answer.refused
    assert answer.err == "error: `--output` must be a path in UTF-8, got 'caf\\udce9'. Choose another.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hidden", -5), "a positive integer"),
        (("--hidden", 10**9), "`--hidden` must be at most 1,048,576"),
        (("--hidden", 4, "--layers", 0), "a positive integer"),
        (("--hidden", 4, "--layers", 10**9), "`--layers` must be at most 1,024"),
        (("--hidden", 4, "--proj", -1), "`--proj` must be"),
        (("--hidden", 4, "--input", "0,2,4"), "three positive integers"),
        (("--hidden", 4, "--input", "-1,2,4"), "three positive integers"),
        (("--hidden", 4, "--input", "99999999999999999999,2,4"), "`--input` must be at most 2,147,483,647"),
    ],
)
def test_explain_refuses_sizes_that_no_layer_has(gatewise, words, message):
    answer = gatewise("explain", "--input", "3,2,4", *words)
    assert answer.refused
    assert answer.err.startswith("error: ")
    assert message in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--embedding-size", 0), "`--embedding-size` must be a positive integer"),
        (("--decoder-layers", -1), "`--decoder-layers` must be a positive integer"),
        (("--set", "attention_size=-3"), "`--set model.attention_size` must be 0 or more"),
        (("--set", "data.vocabulary_size=-9"), "`--vocabulary-size` must be 0 or more"),
        (("--vocabularies", "5,0"), "`--vocabularies` must be two positive integers"),
        (("--lengths", "-5,5"), "`--lengths` must be two positive integers"),
        (("--lengths", "5,99999999999999999999"), "`--lengths` must be at most 2,147,483,647"),
        (("--memory-budget", "nan"), "`--memory-budget` must be"),
        (("--memory-budget=-8GB",), "`--memory-budget` must be"),
        (("--memory-budget", "9" * 400 + "GB"), "`--memory-budget` must be"),
    ],
)
def test_explain_nmt_refuses_sizes_that_no_model_has(gatewise, words, message):
    answer = gatewise("explain", "nmt", *words)
    assert answer.refused
    assert answer.err.startswith("error: ")
    assert message in answer.err


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("train", "lm", "--epochs", "many"), "'many'"),
        (("train", "lm", "--learning-rate", ""), "''"),
        (("generate", "--checkpoint", "run", "--length", 0), "0"),
        (("bench", "lm", "--vocabulary", "many", "--vocabulary", 5), "'many'"),
    ],
)
def test_an_option_that_is_no_number_or_too_small_is_named_with_its_value(gatewise, words, value):
    answer = gatewise(*words)
    said = " ".join(answer.err.split())
    assert answer.status == 2
    assert f"Invalid value for '{words[-2]}'" in said
    assert value in said.partition("Invalid value")[2]

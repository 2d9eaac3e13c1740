"""Recipes: reading, writing, and errors."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from gatewise.cli.classifier_recipe import ClassifierRecipe
from gatewise.cli.nmt_recipe import TranslationRecipe
from gatewise.cli.recipe import Recipe, differences, overridden, parse_settings, read_recipe, to_toml
from gatewise.cli.recipe_files import recipe_files, recipe_path
from gatewise.contract.errors import ArgumentError

RECIPES = [recipe.path for recipe in recipe_files()]
DEFAULTS = {
    "lm": (Recipe(), ("test_perplexity", "share_of_unigram")),
    "nmt": (TranslationRecipe(), ("test_bleu", "test_exact")),
    "classify": (ClassifierRecipe(), ("test_accuracy",)),
}
"""The recipe that the files of a task change, and the scores of which they must expect at least one."""


def changed(*settings):
    return overridden(Recipe(), parse_settings(settings))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_has_a_score_to_expect(path):
    defaults, scores = DEFAULTS[path.parent.name]
    recipe = read_recipe(path, defaults)
    assert recipe.name == path.stem
    assert recipe.description
    assert any(getattr(recipe.expect, score) for score in scores)
    assert recipe.expect.minutes
    assert recipe.expect.on


def test_the_recipe_of_phrases_is_what_training_does_by_itself():
    path = next(path for path in RECIPES if path.stem == "phrases")
    written = read_recipe(path, TranslationRecipe())
    assert set(differences(TranslationRecipe(), written)) <= {
        *("name", "description"),
        *(f"expect.{name}" for name in ("test_bleu", "test_exact", "minutes", "on")),
    }


def test_there_are_recipes():
    assert {path.stem for path in RECIPES} >= {"demo", "wikitext2-medium", "digits", "synthetic", "phrases"}


def test_a_recipe_survives_being_written(tmp_path):
    recipe = changed(
        'name="é \\"quoted\\""', "text.shares=[0.5, 0.25, 0.25]", "training.learning_rate=1e-30", "tied=false"
    )
    (tmp_path / "recipe.toml").write_text(to_toml(recipe), "utf-8")
    assert read_recipe(tmp_path / "recipe.toml") == recipe


def test_every_character_survives_being_written(tmp_path):
    characters = "".join(map(chr, [*range(0x180), 0x2028, 0xFEFF, 0x1F600]))
    recipe = overridden(Recipe(), {"description": characters, "text.train": characters})
    (tmp_path / "recipe.toml").write_bytes(to_toml(recipe).encode())
    assert read_recipe(tmp_path / "recipe.toml") == recipe


def test_a_recipe_of_a_classifier_survives_being_written(tmp_path):
    recipe = overridden(ClassifierRecipe(), parse_settings(['features=["a, b", "ü"]', "test_accuracy=0.5", "seed=3"]))
    (tmp_path / "recipe.toml").write_text(to_toml(recipe), "utf-8")
    assert recipe.data.features == ("a, b", "ü")
    assert read_recipe(tmp_path / "recipe.toml", ClassifierRecipe()) == recipe


def test_settings_reach_their_section_with_and_without_its_name():
    assert changed("training.epochs=3").training.epochs == 3
    assert changed("epochs=3").training.epochs == 3
    assert changed("model.dropout=0").model.dropout == 0.0
    assert changed("source=book.txt").text.source == "book.txt"
    assert changed("text.source=a=b").text.source == "a=b"
    assert changed("threads=2").threads == 2


def test_differences_name_the_keys():
    assert differences(Recipe(), changed("epochs=99", "tied=false", "name=other")) == [
        "name",
        "model.tied",
        "training.epochs",
    ]


@pytest.mark.parametrize(
    "recipe", [Recipe(), ClassifierRecipe(), TranslationRecipe()], ids=lambda recipe: type(recipe).__name__
)
def test_every_value_has_a_description(recipe):
    for owner in [type(recipe), *(type(getattr(recipe, field.name)) for field in dataclasses.fields(recipe))]:
        if dataclasses.is_dataclass(owner):
            for field in dataclasses.fields(owner):
                assert f"\n    {field.name}: " in inspect.getdoc(owner), f"{owner.__name__}.{field.name}"


UNKNOWN = "`--set` must be KEY=VALUE with a key of the recipe, got"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epochs", "`--set` must be key=value, got 'epochs'"),
        ("epochs=3\nseed=1", "`--set` must be one key=value, got 'epochs=3\\nseed=1'. Repeat the option for each key."),
        ("epocs=3", f"{UNKNOWN} 'epocs'. Did you mean training.epochs?"),
        ("training=3", "`training` must be a section, got 3. Name its keys, such as training.epochs."),
        ("sample.epochs=3", f"{UNKNOWN} 'sample.epochs'. Did you mean training.epochs?"),
        ("perplexity=3", f"{UNKNOWN} 'perplexity'. Did you mean expect.test_perplexity or expect.valid_perplexity?"),
        (
            "foo=1",
            f"{UNKNOWN} 'foo'. The keys are name, description, threads, and those in the sections text, model, "
            "training, sample, expect, such as training.epochs. A run writes all of them to recipe.toml in its folder.",
        ),
        ("test_perplexity.x=3", f"{UNKNOWN} 'test_perplexity.x'. Did you mean"),
        ("epochs=many", "`training.epochs` must be an integer, got 'many'"),
        ("epochs=1.5", "`training.epochs` must be an integer, got 1.5"),
        ("epochs=true", "`training.epochs` must be an integer, got True"),
        (f"epochs={'9' * 5000}", "`training.epochs` must be an integer, got '999"),
        ("tied=1", "`model.tied` must be true or false, got 1"),
        ("dropout=high", "`model.dropout` must be a number, got 'high'"),
        ("text.shares=[1, true, 'x']", "`text.shares` must be a list of numbers"),
        ("optimizer=lion", "`optimizer` must be one of sgd, adam, adamw, got 'lion'"),
    ],
)
def test_bad_settings_are_refused(setting, message):
    with pytest.raises(ArgumentError) as error:
        changed(setting)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[training", "must be a TOML file, got"),
        (b"\xff", "must be a TOML file, got"),
        (b"training.epochs = " + b"9" * 5000, "must be a TOML file, got"),
        (b"training.epochs = " + b"[" * 5000, "must be a TOML file, got"),
        (
            b"training.learning_rate = " + b"9" * 400,
            "`training.learning_rate` must be a number that a float can hold, got 99",
        ),
        (
            b"[trianing]\nepochs = 3",
            "`recipe` must be a TOML file with keys of a recipe, got 'trianing.epochs'. Did you mean training.epochs?",
        ),
        (b"training = 3", "`training` must be a section, got 3. Name its keys, such as training.epochs."),
        (b"[[training]]\nepochs = 3", "`training` must be a section, got [{'epochs': 3}]. Name its keys"),
        (b"threads = -1", "`the key threads` must be 0 or more, got -1"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    (tmp_path / "recipe.toml").write_bytes(content)
    with pytest.raises(ArgumentError) as error:
        read_recipe(tmp_path / "recipe.toml")
    assert message in str(error.value)
    assert str(tmp_path / "recipe.toml") in str(error.value)


def test_a_key_outside_of_sections_is_named_as_in_the_file(gatewise, tmp_path):
    (tmp_path / "recipe.toml").write_text('name = "../mine"')
    answer = gatewise("train", "lm", "--recipe", tmp_path / "recipe.toml")
    assert "recipe.toml: `the key name` must be a plain folder name" in " ".join(answer.err.split())


def test_a_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "recipe.toml").write_bytes(b"\xef\xbb\xbf[training]\nepochs = 3")
    assert read_recipe(tmp_path / "recipe.toml").training.epochs == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"`recipe` must be a TOML file.* got .*absent\.toml"):
        read_recipe(tmp_path / "absent.toml")


@pytest.mark.parametrize("recipe", recipe_files(), ids=lambda recipe: recipe.name)
def test_a_recipe_is_found_by_its_name_and_its_command_says_so(recipe):
    assert recipe_path(recipe.task, recipe.name) == recipe.path
    assert f"#   {recipe.command}" in recipe.path.read_text("utf-8")


def test_a_file_comes_before_a_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert recipe_path("lm", "demo") == next(path for path in RECIPES if path.stem == "demo")
    Path("demo").rmdir()
    Path("demo").write_text("")
    assert recipe_path("lm", "demo") == Path("demo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "phrases",
            "`--recipe` must be a recipe of `gatewise train lm`, got 'phrases'. Run: gatewise train nmt --recipe",
        ),
        (
            "recipes/demo.toml",
            "must be a TOML file or one of demo, wikitext2-awd-lstm, wikitext2-medium, got 'recipes/demo.toml'. Did",
        ),
        ("absent.toml", "Check the path. The command `gatewise recipes` lists the names."),
    ],
)
def test_a_recipe_that_is_not_there_is_refused(name, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        recipe_path("lm", name)


@pytest.mark.parametrize("command", ["train", "explain"])
def test_an_empty_name_is_no_recipe(gatewise, command):
    answer = gatewise(command, "nmt", "--recipe", "")
    assert answer.refused
    assert "`--recipe` must be a TOML file or one of phrases, tatoeba-deu-eng, got ''." in answer.err


def test_the_command_lists_every_recipe(gatewise):
    answer = gatewise("recipes")
    assert answer.status == 0
    for recipe in recipe_files():
        assert f"{recipe.command}\n" in answer.out
        for line in recipe.summary.splitlines():
            assert f"    {line}\n" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_the_command_prints_a_recipe_which_can_be_run(gatewise, tmp_path):
    answer = gatewise("recipes", "demo")
    (tmp_path / "mine.toml").write_text(answer.out, "utf-8")
    assert read_recipe(tmp_path / "mine.toml") == read_recipe(recipe_path("lm", "demo"))
    refused = gatewise("recipes", "absent")
    assert refused.refused
    assert "`NAME` must be one of digits, synthetic, demo" in refused.err


def test_a_classifier_has_no_rate_for_a_number_of_tokens():
    message = r"`rate_tokens` must be 0 for a classifier, got 5600\. A classifier's batches are counted in sequences"
    with pytest.raises(ArgumentError, match=message):
        overridden(ClassifierRecipe(), parse_settings(["training.rate_tokens=5600"]))
    assert overridden(ClassifierRecipe(), parse_settings(["training.rate_tokens=0"])) == ClassifierRecipe()


@pytest.mark.parametrize(
    ("recipe", "known"),
    [(Recipe(), "loss"), (ClassifierRecipe(), "loss"), (TranslationRecipe(), "loss, BLEU, chrF")],
    ids=["lm", "classify", "nmt"],
)
def test_the_best_weights_are_chosen_by_a_figure_of_the_task(recipe, known):
    with pytest.raises(ArgumentError, match=rf"`best_by` must be one of {known}, got 'accuracy'\."):
        overridden(recipe, parse_settings(["best_by=accuracy"]))
    chosen = known.rpartition(" ")[2]
    assert overridden(recipe, parse_settings([f"best_by={chosen}"])).training.best_by == chosen

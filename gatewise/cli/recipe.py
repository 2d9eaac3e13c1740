"""Recipes: complete training runs as TOML files, with their expected scores."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import reprlib
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from gatewise.cli.folder_name import FOLDER_NAME
from gatewise.cli.option_names import naming
from gatewise.contract.errors import ArgumentError, sentence
from gatewise.contract.option import Option
from gatewise.contract.ranges import (
    AMOUNT,
    COUNT,
    COUNT_OR_NONE,
    LAYERS,
    PROBABILITY,
    SHARE,
    SIZE,
    THREADS,
    Range,
    check_ranges,
)
from gatewise.data.corpus import SHARES
from gatewise.training.options import TrainingOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PYTHON_TOPICS = "python-topics"

_SIZE_OR_NONE = Range("0 or more", 0, SIZE.most)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The text and how it is tokenised and batched: section `[text]`.

    Attributes:
        source: ``"python-topics"``, the help pages of the installed Python, or the path of one file, which is split by
            `shares`. Not used if the three files are given.
        train: The path of the training text.
        valid: The path of the validation text.
        test: The path of the test text.
        shares: The fractions of the text for training, validation and test.
        tokens: The kind of tokens: ``"word"``, ``"character"``, ``"byte"`` or ``"bpe"``.
        vocabulary_size: The largest vocabulary; 0 keeps every word or character, and means 2,000 for bpe.
        batch_size: The number of columns of text that are read in parallel, over all processes.
        window: The number of time steps between two updates of the weights.
        evaluation_batch_size: The number of columns for validation and test.
        evaluation_window: The number of time steps of a call for validation and test, which the result does not depend
            on; 0 for `window`.
        rotate: Whether each epoch starts at a different place in the text.
        jitter: The standard deviation of the lengths of windows in training, as in `gatewise.data.TokenStream`; 0 for
            windows of equal lengths.
    """

    source: Annotated[str, Option("One UTF-8 file, which is split 90/5/5.", name="--text")] = PYTHON_TOPICS
    train: Annotated[str, Option("The training text, UTF-8.")] = ""
    valid: Annotated[str, Option("The validation text.")] = ""
    test: Annotated[str, Option("The test text.")] = ""
    shares: tuple[float, float, float] = SHARES
    tokens: Annotated[str, Option("word, character, byte or bpe.")] = "bpe"
    vocabulary_size: Annotated[int, COUNT_OR_NONE, Option("Largest vocabulary; 0: no limit, or 2,000 for bpe.")] = 0
    batch_size: Annotated[int, COUNT, Option("Columns of text that are read in parallel.")] = 20
    window: Annotated[int, COUNT, Option("Time steps between two updates.")] = 35
    evaluation_batch_size: Annotated[int, COUNT] = 10
    evaluation_window: Annotated[int, COUNT_OR_NONE] = 0
    rotate: bool = False
    jitter: Annotated[float, AMOUNT] = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The arguments of `gatewise.models.LanguageModel`: `[model]`.

    Attributes:
        embedding_size: The number of features of embeddings.
        hidden_size: The number of hidden units of a layer.
        num_layers: The number of LSTM layers.
        dropout: The dropout probability before the softmax.
        embedding_dropout: The dropout probability after the embedding.
        layer_dropout: The dropout probability between LSTM layers.
        last_hidden_size: The number of hidden units of the last layer; 0 for `hidden_size`.
        locked: Whether a dropout mask is the same at all time steps of a window.
        word_dropout: The probability of dropping all embeddings of a word in a window.
        weight_dropout: The probability of dropping an element of a recurrent matrix in a window.
        activation_penalty: The factor of the mean square of the last layer's output after dropout.
        change_penalty: The factor of the mean square of its change from one step to the next.
        tied: Whether embedding and softmax share their weights; if their sizes differ, a projection connects them.
        kernel: The kernel of the LSTM; ``"auto"`` chooses the fastest.
    """

    embedding_size: Annotated[int, SIZE, Option("The size of embeddings.")] = 256
    hidden_size: Annotated[int, SIZE, Option("Hidden units of a layer.")] = 256
    num_layers: Annotated[int, LAYERS, Option("LSTM layers.")] = 2
    dropout: Annotated[
        float, PROBABILITY, Option("All three dropout probabilities.", also=("embedding_dropout", "layer_dropout"))
    ] = 0.2
    embedding_dropout: Annotated[float, PROBABILITY] = 0.2
    layer_dropout: Annotated[float, PROBABILITY] = 0.2
    last_hidden_size: Annotated[int, _SIZE_OR_NONE] = 0
    locked: bool = False
    word_dropout: Annotated[float, PROBABILITY] = 0.0
    weight_dropout: Annotated[float, PROBABILITY] = 0.0
    activation_penalty: Annotated[float, AMOUNT] = 0.0
    change_penalty: Annotated[float, AMOUNT] = 0.0
    tied: Annotated[bool, Option("Share the weights of embedding and softmax.")] = True
    kernel: Annotated[str, Option("auto, or the name of a kernel.")] = "auto"

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """The text that is generated at the end: section `[sample]`.

    Attributes:
        prompt: The beginning of the text.
        length: The number of tokens.
        temperature: The temperature; see `gatewise.models.generate`.
        top_k: The number of most likely tokens to sample from; 0 for all.
        top_p: The total probability of the most likely tokens to sample from; 1 for all.
    """

    prompt: str = "The "
    length: Annotated[int, COUNT_OR_NONE] = 100
    temperature: Annotated[float, AMOUNT] = 0.8
    top_k: Annotated[int, COUNT_OR_NONE] = 0
    top_p: Annotated[float, SHARE] = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The expected results, which are compared and printed at the end of the run: section `[expect]`.

    Attributes:
        test_perplexity: The largest perplexity on the test text; 0 for no expectation.
        valid_perplexity: The largest perplexity on the validation text; 0 for no expectation.
        share_of_unigram: The largest validation perplexity as a fraction of a unigram model's; 0 for no expectation.
        minutes: The duration on the device named in `on`; 0 for no expectation.
        on: The name of the device for `minutes`.
    """

    test_perplexity: Annotated[float, AMOUNT] = 0.0
    valid_perplexity: Annotated[float, AMOUNT] = 0.0
    share_of_unigram: Annotated[float, AMOUNT] = 0.0
    minutes: Annotated[float, AMOUNT] = 0.0
    on: str = ""

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)


_TRAINING = TrainingOptions()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A complete training run.

    Attributes:
        name: The name of the run, and of its folder under `runs/`.
        description: A description in one line.
        threads: The number of CPU threads; 0 for PyTorch's default. The bits of a result depend on it.
        text: The section `[text]`; see `TextOptions`.
        model: The section `[model]`; see `ModelOptions`.
        training: The section `[training]`; see `gatewise.training.TrainingOptions`.
        sample: The section `[sample]`; see `SampleOptions`.
        expect: The section `[expect]`; see `Expectation`.
    """

    name: Annotated[str, FOLDER_NAME] = "lm"
    description: str = ""
    threads: Annotated[int, THREADS, Option("CPU threads; 0: PyTorch's default.")] = 0
    text: TextOptions = TextOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = _TRAINING
    sample: SampleOptions = SampleOptions()
    expect: Expectation = Expectation()

    def __post_init__(self) -> None:
        """Check the values."""
        check_ranges(self)
        self.training.check_best_by()


_DEFAULTS = Recipe()
AnyRecipe = TypeVar("AnyRecipe", bound="DataclassInstance")
"""A recipe of any task: a frozen dataclass of plain values and sections; see `Recipe`."""


def read_recipe(path: Path, defaults: AnyRecipe = _DEFAULTS) -> AnyRecipe:
    """Read a recipe from a TOML file.

    Args:
        path: The file.
        defaults: A recipe of the same type, with the values for keys that the file leaves out.

    Raises:
        ArgumentError: The file is missing, is not TOML, or has an unknown key or value.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ArgumentError(
            sentence("recipe", "a TOML file", f"{path}, which does not exist", "Check the path.")
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # of the encoding, of TOML, or of a number
        raise ArgumentError(sentence("recipe", "a TOML file", f"{path}: {error}", "Correct the file.")) from None
    names = {name: f"{section}.{name}" for section in _section_names(defaults) for name in _types(defaults, section)}
    # A bare name would be replaced by the option that sets it, which is not what the file has.
    names |= {name: f"the key {name}" for name in _plain_names(defaults)}
    try:
        with naming(names):
            return overridden(defaults, dict(_leaves(document)), _OF_FILES)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


class _Source(NamedTuple):
    """Where values come from, for errors about their keys.

    Attributes:
        name: The option or argument that the keys are given by.
        expectation: The description of a right value, which follows "must be" in the error.
    """

    name: str
    expectation: str


_OF_SETTINGS = _Source("--set", "KEY=VALUE with a key of the recipe")
_OF_FILES = _Source("recipe", "a TOML file with keys of a recipe")


def overridden(recipe: AnyRecipe, values: Mapping[str, Any], source: _Source = _OF_SETTINGS) -> AnyRecipe:
    """Return a recipe with some values replaced.

    Args:
        recipe: The original recipe.
        values: The new values by dotted key, such as ``"training.epochs"``; a key without a dot may be in any section.
        source: Where the values come from.

    Raises:
        ArgumentError: A key is unknown or is in several sections, or a value has the wrong type.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = _place(recipe, key, value, source)
        kind = _types(recipe, section)[name]
        sections.setdefault(section, {})[name] = _converted(f"{section}.{name}".lstrip("."), kind, value)
    changes: dict[str, Any] = sections.pop("", {})
    for section, fields in sections.items():
        changes[section] = dataclasses.replace(getattr(recipe, section), **fields)
    return dataclasses.replace(recipe, **changes)


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse settings ``key=value`` like TOML; a value that is not TOML is a string.

    Raises:
        ArgumentError: A setting has no equals sign, or several keys on lines of their own.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ArgumentError(sentence("--set", "key=value", repr(setting), "For example: --set training.epochs=3"))
        try:
            found = tomllib.loads(f"value = {text}")
        except (ValueError, RecursionError):
            found = {"value": text}
        if len(found) > 1:
            raise ArgumentError(sentence("--set", "one key=value", repr(setting), "Repeat the option for each key."))
        values[key.strip()] = found["value"]
    return values


def to_toml(recipe: DataclassInstance) -> str:
    """Return a recipe as a complete TOML document, from which `read_recipe` returns the same recipe."""
    lines = [f"{name} = {_toml_value(getattr(recipe, name))}" for name in _plain_names(recipe)]
    for section in _section_names(recipe):
        lines += ["", f"[{section}]"]
        for field in dataclasses.fields(getattr(recipe, section)):
            lines.append(f"{field.name} = {_toml_value(getattr(getattr(recipe, section), field.name))}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    # The only character that TOML wants escaped and JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(one: DataclassInstance, other: DataclassInstance) -> list[str]:
    """Return the dotted keys of the values that differ between two recipes."""
    left, right = (dict(_leaves(dataclasses.asdict(recipe))) for recipe in (one, other))
    return [key for key in left if left[key] != right[key]]


def _leaves(document: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield key, value


def _section_names(recipe: DataclassInstance) -> list[str]:
    return [field.name for field in dataclasses.fields(recipe) if dataclasses.is_dataclass(field.default)]


def _plain_names(recipe: DataclassInstance) -> list[str]:
    return [field.name for field in dataclasses.fields(recipe) if not dataclasses.is_dataclass(field.default)]


def _types(recipe: DataclassInstance, section: str) -> dict[str, Any]:
    return _hints(type(getattr(recipe, section) if section else recipe))


# The annotations of a class are written with it and do not change.
_hints = functools.cache(typing.get_type_hints)


def _place(recipe: DataclassInstance, key: str, value: Any, source: _Source) -> tuple[str, str]:
    """Return the section and the name of a key, whose value and source are only named in errors."""
    known = [("", name) for name in _plain_names(recipe)]
    known += [(section, name) for section in _section_names(recipe) for name in _types(recipe, section)]
    places = [place for place in known if key in (".".join(place).lstrip("."), place[1])]
    exact = [place for place in places if ".".join(place).lstrip(".") == key]
    if len(exact) == 1 or len(places) == 1:
        return (exact or places)[0]
    names = [".".join(place).lstrip(".") for place in (places or known)]
    if places:
        raise ArgumentError(
            f"`{key}` must name one key of the recipe, got several: {', '.join(names)}. Write the section too."
        )
    if key in _section_names(recipe):
        advice = f"Name its keys, such as {next(name for name in names if name.startswith(f'{key}.'))}."
        raise ArgumentError(sentence(key, "a section", reprlib.repr(value), advice))
    section, _, word = key.rpartition(".")
    elsewhere = [".".join(place).lstrip(".") for place in known if section and place[1] == word]
    close = elsewhere or _near(key, names)
    raise ArgumentError(sentence(source.name, source.expectation, repr(key), _advice(recipe, close)))


def _near(key: str, names: list[str]) -> list[str]:
    """Return the dotted keys that a key is similar to, with or without their sections."""
    similar = difflib.get_close_matches(key, [*names, *(name.rpartition(".")[2] for name in names)], n=3)
    return list(dict.fromkeys(name for each in similar for name in names if each in (name, name.rpartition(".")[2])))


def _advice(recipe: DataclassInstance, close: list[str]) -> str:
    if close:
        return f"Did you mean {' or '.join(close[:3])}?"
    plain, sections = ", ".join(_plain_names(recipe)), ", ".join(_section_names(recipe))
    return (
        f"The keys are {plain}, and those in the sections {sections}, such as training.epochs. A run writes all of "
        "them to recipe.toml in its folder."
    )


def _converted(key: str, kind: Any, value: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(key, value)
    if kind == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise ArgumentError(sentence(key, "a list of strings", repr(value)))
    if typing.get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value):
            return tuple(_float(key, each) for each in value)
    elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    raise ArgumentError(sentence(key, names.get(kind, "a list of numbers"), repr(value)))


def _float(key: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        expectation = "a number that a float can hold"
        raise ArgumentError(sentence(key, expectation, reprlib.repr(value))) from None

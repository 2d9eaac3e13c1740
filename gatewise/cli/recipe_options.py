"""Command-line options generated from the fields of a recipe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import typer

from gatewise.cli.option_names import naming
from gatewise.cli.run_options import RUN
from gatewise.contract.option import Option


def recipe_options(recipe: Any, *keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's keyword parameter `given` with options.

    There is one option for every field of the recipe, or of its sections, whose annotation has an `Option`. The command
    is called with the values that were given on the command line, by dotted key, as `overridden` takes them.

    Args:
        recipe: The recipe with the defaults that the help shows.
        keys: The dotted keys of the fields that get options; empty for all.
    """
    declared = {each.key.replace(".", "__"): each for each in _declared(recipe) if not keys or each.key in keys}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def called(context: typer.Context, **values: Any) -> None:
            given = {}
            for name, each in declared.items():
                value, source = values.pop(name), context.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    given |= dict.fromkeys((each.key, *each.also), value)
            with naming(option_names(recipe)):
                command(**values, given=given)

        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name == "given":
                parameters += [_parameter(name, each) for name, each in declared.items()]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        # The version of Typer determines which of the two it reads.
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return decorate


def option_names(recipe: Any) -> dict[str, str]:
    """Return the option that sets each field of a recipe, by the field's name, which only one section has."""
    sections = {"": recipe} | {
        field.name: getattr(recipe, field.name)
        for field in dataclasses.fields(recipe)
        if dataclasses.is_dataclass(field.default)
    }
    names = {
        field.name: f"--set {section}.{field.name}".replace(" .", " ")
        for section, holder in sections.items()
        for field in dataclasses.fields(holder)
        if field.name not in sections
    }
    return names | {each.field: each.word for each in _declared(recipe)}


class _Declared(NamedTuple):
    section: str
    field: str
    kind: Any
    default: Any
    option: Option

    @property
    def key(self) -> str:
        return f"{self.section}.{self.field}".lstrip(".")

    @property
    def word(self) -> str:
        return self.option.name or f"--{self.field.replace('_', '-')}"

    @property
    def also(self) -> list[str]:
        return [self._replace(field=other).key for other in self.option.also]


def _declared(options: Any, section: str = "") -> Iterator[_Declared]:
    """Yield the fields with an option, those of sections first."""
    for field, hint in sorted(_hints(type(options)).items(), key=lambda each: not dataclasses.is_dataclass(each[1])):
        value = getattr(options, field)
        if dataclasses.is_dataclass(value):
            yield from _declared(value, field)
        for each in typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ():
            if isinstance(each, Option):
                yield _Declared(section, field, typing.get_args(hint)[0], value, each)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _parameter(name: str, declared: _Declared) -> inspect.Parameter:
    kind, default, option = declared.kind, declared.default, declared.option
    several = typing.get_origin(kind) is tuple
    word = declared.word
    declaration = typer.Option(
        f"{word}/--no-{word.removeprefix('--')}" if kind is bool else word,
        help=option.help,
        metavar=option.metavar or None,
        show_default=default not in ("", ()),
        rich_help_panel=option.panel or declared.section.capitalize() or RUN,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) if several else default,
        annotation=Annotated[list[str] if several else kind, declaration],
    )

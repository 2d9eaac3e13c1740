"""Names in errors: the libraries name arguments and fields, the command line names the options that set them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gatewise.contract.errors import GatewiseError

_NAMES = re.compile(r"`(\w[\w ]*(?:, \w[\w ]*)*)`")


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Replace names in the errors that leave the block.

    Args:
        names: The new name for each name that may stand between backticks in a sentence; others are kept.
    """
    try:
        yield
    except GatewiseError as error:
        found, *rest = error.args or ("",)
        error.args = (_NAMES.sub(lambda match: _renamed(match[1], names), str(found)), *rest)
        raise


def name_options(command: Any) -> None:
    """Make a command and its subcommands name their options in errors, such as `--beam-size` for `beam_size`.

    Arguments are named in capital letters, as in the help.

    Args:
        command: The command, as `typer.main.get_command` returns it.
    """
    for inner in getattr(command, "commands", {}).values():
        name_options(inner)
    names = {parameter.name: _word(parameter) for parameter in command.params}
    called = command.invoke

    def invoke(ctx: Any) -> Any:
        with naming(names):
            return called(ctx)

    command.invoke = invoke


def _word(parameter: Any) -> str:
    word = parameter.opts[0]
    return word if word.startswith("--") else word.upper()


def _renamed(listed: str, names: Mapping[str, str]) -> str:
    return ", ".join(f"`{names.get(name, name)}`" for name in listed.split(", "))

"""Checks of all numbers and texts on the command line, which come before those of their ranges and meaning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import typer

_MACHINE = 2**63
"""The limit of 64-bit integers."""


def check_values(command: Any) -> None:
    """Make a command and its subcommands refuse infinity, NaN, integers beyond 64 bits, and text that is not UTF-8.

    Paths of files that are only read or written may be any bytes; they are not text. Empty paths are refused, because
    they would mean the current folder.

    Args:
        command: The command, as `typer.main.get_command` returns it.
    """
    for inner in getattr(command, "commands", {}).values():
        check_values(inner)
    for parameter in command.params:
        _check_values(parameter)


def is_utf8(text: str) -> bool:
    """Return whether a text can be written to files: Python reads bytes that are not UTF-8 as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _add_value(error: Any, value: Any) -> None:
    """Add the value to an error of Typer that does not have it; the version of Typer determines which do not."""
    given = value if isinstance(value, list | tuple) else (value,)
    if value is not None and not any(str(each) in error.message for each in given if each != ""):
        error.message = f"{error.message.rstrip('.')}, got {', '.join(repr(each) for each in given)}."


def _check_values(parameter: Any) -> None:
    converted = parameter.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        try:
            found = converted(ctx, value)
        except typer.BadParameter as error:
            _add_value(error, value)
            raise
        if value == "" and isinstance(found, Path):
            raise typer.BadParameter("'' is no path; the current folder is '.'.", ctx=ctx, param=parameter)
        for each in found if isinstance(found, list | tuple) else (found,):
            if isinstance(each, float) and not math.isfinite(each):
                raise typer.BadParameter(f"{each} is not a finite number.", ctx=ctx, param=parameter)
            if isinstance(each, int) and not -_MACHINE <= each < _MACHINE:
                raise typer.BadParameter(f"{each} is too large for an integer.", ctx=ctx, param=parameter)
            if isinstance(each, str) and not is_utf8(each):
                advice = "Write it in UTF-8; if it is the name of a file, rename the file."
                raise typer.BadParameter(f"{each!a} is not UTF-8. {advice}", ctx=ctx, param=parameter)
        return found

    parameter.process_value = process_value

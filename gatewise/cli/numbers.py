"""Checks of all numbers on the command line, which come before the checks of their ranges."""

from __future__ import annotations

import math
from typing import Any

import typer

_MACHINE = 2**63
"""The limit of 64-bit integers."""


def check_numbers(command: Any) -> None:
    """Make a command and its subcommands refuse infinity, NaN, and integers beyond 64 bits.

    Args:
        command: The command, as `typer.main.get_command` returns it.
    """
    for inner in getattr(command, "commands", {}).values():
        check_numbers(inner)
    for parameter in command.params:
        _check_values(parameter)


def _check_values(parameter: Any) -> None:
    converted = parameter.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        found = converted(ctx, value)
        for each in found if isinstance(found, list | tuple) else (found,):
            if isinstance(each, float) and not math.isfinite(each):
                raise typer.BadParameter(f"{each} is not a finite number.", ctx=ctx, param=parameter)
            if isinstance(each, int) and not -_MACHINE <= each < _MACHINE:
                raise typer.BadParameter(f"{each} is too large for an integer.", ctx=ctx, param=parameter)
        return found

    parameter.process_value = process_value

"""The root of the command line, which lists the commands without importing them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from gatewise import _program
from gatewise._version import __version__
from gatewise.cli.failures import reported
from gatewise.cli.option_names import name_options
from gatewise.cli.values import check_values

if TYPE_CHECKING:
    from gatewise.cli import Command

_CALLED = "gatewise.command"


def application(commands: Sequence[Command]) -> Callable[..., None]:
    """Return the program with the given commands."""
    known = {command.name: command for command in commands}

    class Commands(TyperGroup):
        def list_commands(self, ctx: object) -> list[str]:
            return list(known)

        def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
            """Return a command with the properties that the list of commands shows, without importing its module."""
            return TyperCommand(cmd_name, help=known[cmd_name].summary) if cmd_name in known else None

        def resolve_command(  # pyright: ignore[reportIncompatibleMethodOverride] - Typer calls it with its own context
            self, ctx: typer.Context, args: list[str]
        ) -> tuple[Any, Any, list[str]]:
            """Import the command that is called."""
            name, command, rest = super().resolve_command(ctx, args)
            if name in known:
                ctx.meta[_CALLED] = known[name]
                command = command_named(known[name].module)
            return name, command, rest

        def invoke(self, ctx: typer.Context) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - likewise
            """Run the command, and report errors before Typer reports them in its own way."""
            with reported(lambda: ctx.meta[_CALLED].advice):
                _program.loaded()
                return super().invoke(ctx)

    root = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Train LSTM models, and show which kernel computes a recurrent layer.",
    )

    @root.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Train LSTM models, and show which kernel computes a recurrent layer."""

    return typer.main.get_command(root)


def command_named(module: str) -> Any:
    """Return the command of a module, with checks of all values, and options in its errors."""
    command = typer.main.get_command(importlib.import_module(module).app)
    check_values(command)
    name_options(command)
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit

"""The command line: `gatewise COMMAND`. A new command is a file here and a line in `COMMANDS`."""

from __future__ import annotations

import sys
from typing import NamedTuple, NoReturn

from gatewise.contract.errors import GatewiseError, MissingExtra, ProcessFailed


class Command(NamedTuple):
    """A command that is imported when it is called.

    Attributes:
        name: What is typed.
        module: Where its `app`, a `typer.Typer`, is.
        summary: Its line in the list of commands.
    """

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("train", "gatewise.cli.train", "Train a model: lm, nmt or classify."),
    Command("evaluate", "gatewise.cli.evaluate", "Score a trained classifier, or let it answer."),
    Command("generate", "gatewise.cli.generate", "Let a trained language model write."),
    Command("translate", "gatewise.cli.translate", "Translate lines with a trained model."),
    Command("convert", "gatewise.cli.convert", "Bring weights from Keras, TensorFlow and others, and back."),
    Command("bench", "gatewise.cli.bench", "Measure, and write reports from what was measured."),
    Command("explain", "gatewise.cli.explain", "Say which kernel a call would run, why, and what would help."),
    Command("replay", "gatewise.cli.replay", "Repeat a step of training that was recorded as not finite."),
    Command("doctor", "gatewise.cli.doctor", "Say what is installed, what is missing, and test every kernel."),
)

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command that the program's arguments name, and exit."""
    try:
        try:
            import rich
            import typer

            from gatewise.cli.application import application
        except ModuleNotFoundError as error:
            package = (error.name or "typer").partition(".")[0]
            raise MissingExtra.for_package(package, "the command line", "train") from None
        del rich, typer
        application(COMMANDS)(prog_name="gatewise")
    except ProcessFailed:
        sys.exit(1)  # what failed there was printed when it was heard of
    except GatewiseError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    sys.exit(0)


def _fail(message: str) -> NoReturn:
    """Print one error on the terminal, as it stands in the exception, and exit."""
    text = f"error: {message}"
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(text, file=sys.stderr)
    else:
        console = Console(stderr=True, highlight=False)
        console.print(f"[bold red]error:[/bold red] {_escaped(message)}", soft_wrap=not console.is_terminal)
    sys.exit(1)


def _escaped(message: str) -> str:
    from rich.markup import escape

    return escape(message)

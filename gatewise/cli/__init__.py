"""The command line: `gatewise COMMAND`. A new command is a file here and a line in `COMMANDS`."""

from __future__ import annotations

import sys
from typing import NamedTuple, NoReturn

from gatewise import _program
from gatewise.cli.failures import flush_output, reported, write_any_character
from gatewise.contract.errors import MissingExtra


class Command(NamedTuple):
    """A command, whose module is imported when the command is called.

    Attributes:
        name: The name of the command.
        module: The module that contains its `app`, a `typer.Typer`.
        summary: The description in the list of commands.
        advice: The advice in the error for too little memory.
    """

    name: str
    module: str
    summary: str
    advice: str = "Reduce the sizes, or close other programs."


_SMALLER = "Use a smaller model, or close other programs."
COMMANDS = (
    Command("train", "gatewise.cli.train", "Train a language model, a translation model or a classifier."),
    Command(
        "evaluate",
        "gatewise.cli.evaluate",
        "Score a trained classifier, or write its predictions.",
        "Split the file of `--data`.",
    ),
    Command("generate", "gatewise.cli.generate", "Generate text with a trained language model.", _SMALLER),
    Command(
        "translate",
        "gatewise.cli.translate",
        "Translate lines of text with a trained translation model.",
        "Lower `--batch-lines` or `--beam-size`.",
    ),
    Command("convert", "gatewise.cli.convert", "Convert weights from and to Keras, TensorFlow and others.", _SMALLER),
    Command("recipes", "gatewise.cli.recipe_list", "List the recipes (settings of complete training runs)."),
    Command("bench", "gatewise.cli.bench", "Run benchmarks, and write reports from their records."),
    Command("explain", "gatewise.cli.explain", "Show which kernel a call would run, why, and what would help."),
    Command("tune", "gatewise.cli.tune", "Measure the kernels on this machine, to choose by these times."),
    Command(
        "replay",
        "gatewise.cli.replay",
        "Repeat a recorded training step whose loss was not finite.",
        "Use another `--device`, or close other programs.",
    ),
    Command("doctor", "gatewise.cli.doctor", "Show what is installed, and test every kernel on this machine."),
)


def main() -> NoReturn:
    """Run the command given by the program's arguments, and exit."""
    status: str | int | None = 0
    write_any_character()
    with reported():
        try:
            import rich
            import typer

            from gatewise.cli.application import application
        except ModuleNotFoundError as error:
            package = (error.name or "typer").partition(".")[0]
            raise MissingExtra(
                f"the command line needs `{package}`, which is not installed. Run: pip install {package}"
            ) from None
        del rich, typer
        try:
            application(COMMANDS)(prog_name="gatewise")
        except SystemExit as leaving:
            status = leaving.code
        flush_output()
    _program.ended(status == _program.INTERRUPTED)
    sys.exit(status)

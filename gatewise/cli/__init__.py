"""The command line: `gatewise COMMAND`. A new command is a file here and a line in `COMMANDS`."""

from __future__ import annotations

import sys
from typing import NamedTuple, NoReturn

from gatewise import _program
from gatewise.cli.failures import flush_output, reported
from gatewise.contract.errors import MissingExtra


class Command(NamedTuple):
    """A command that is imported when it is called.

    Attributes:
        name: What is typed.
        module: Where its `app`, a `typer.Typer`, is.
        summary: Its line in the list of commands.
        advice: A sentence for users who have too little memory.
    """

    name: str
    module: str
    summary: str
    advice: str = "Lower the sizes, or end other programs."


_SMALLER = "Take a smaller model, or end other programs."
COMMANDS = (
    Command("train", "gatewise.cli.train", "Train a model: lm, nmt or classify."),
    Command(
        "evaluate",
        "gatewise.cli.evaluate",
        "Score a trained classifier, or let it answer.",
        "Divide the file of `--data`.",
    ),
    Command("generate", "gatewise.cli.generate", "Let a trained language model write.", _SMALLER),
    Command(
        "translate",
        "gatewise.cli.translate",
        "Translate lines with a trained model.",
        "Lower `--batch-lines` or `--beam-size`.",
    ),
    Command("convert", "gatewise.cli.convert", "Bring weights from Keras, TensorFlow and others, and back.", _SMALLER),
    Command("bench", "gatewise.cli.bench", "Measure, and write reports from what was measured."),
    Command("explain", "gatewise.cli.explain", "Say which kernel a call would run, why, and what would help."),
    Command("tune", "gatewise.cli.tune", "Measure this machine, so that its times choose kernels."),
    Command(
        "replay",
        "gatewise.cli.replay",
        "Repeat a step of training that was recorded as not finite.",
        "Take another `--device`, or end other programs.",
    ),
    Command("doctor", "gatewise.cli.doctor", "Say what is installed, what is missing, and test every kernel."),
)


def main() -> NoReturn:
    """Run the command that the program's arguments name, and exit."""
    status: str | int | None = 0
    with reported():
        try:
            import rich
            import typer

            from gatewise.cli.application import application
        except ModuleNotFoundError as error:
            package = (error.name or "typer").partition(".")[0]
            raise MissingExtra.for_package(package, "the command line", "train") from None
        del rich, typer
        try:
            application(COMMANDS)(prog_name="gatewise")
        except SystemExit as leaving:
            status = leaving.code
        flush_output()
    _program.ended(status == _program.INTERRUPTED)
    sys.exit(status)

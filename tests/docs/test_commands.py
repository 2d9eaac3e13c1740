"""All commands in the documentation exist: programs, options, make targets and files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gatewise.cli import COMMANDS
from gatewise.cli.recipe_files import recipe_named

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINES = [
    pytest.param(line, id=f"{document.stem}: {line.partition('#')[0].strip()}")
    for document in DOCUMENTS
    for block in BLOCK.findall(document.read_text("utf-8"))
    for line in block.splitlines()
]


def options_of(words: list[str]) -> tuple[set[str], list[str]]:
    """Return the options of the command that `words` names, and the words after its name."""
    from gatewise.cli.application import application

    command, context = application(COMMANDS), None
    # A group of commands, which may itself be a command.
    while hasattr(command, "resolve_command") and not (words and words[0].startswith("-")):
        context = command.context_class(command, parent=context)
        _, command, words = command.resolve_command(context, words)
        assert command is not None
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names | {"--help"}, words


@pytest.mark.parametrize("line", LINES)
def test_a_shown_command_exists(line: str) -> None:
    pytest.importorskip("typer")
    program, *words = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
        assert words[0] in targets
        return
    if program == "torchrun":
        program, words = "gatewise", words[words.index("gatewise") + 1 :]
    if program == "gatewise":
        known, rest = options_of(words)
        options = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert options <= known
        if "--recipe" in rest:
            recipe_named(rest[rest.index("--recipe") + 1])
    for word in words:
        if word.startswith(("benchmarks/", "docs/", "examples/")):
            assert (ROOT / word).exists()

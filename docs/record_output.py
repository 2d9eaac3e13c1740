"""Fill a page's blocks of program output with what the programs print here and now.

    python docs/record_output.py docs/doctor.md cpu      # on a machine without a GPU
    python docs/record_output.py docs/doctor.md h200     # on one with an H200

A block stands between two marks and belongs to a machine; it is never typed:

    <!-- output: h200: gatewise doctor -->
    <!-- /output -->
"""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from gatewise.files import write_text

BLOCK = re.compile(
    r"<!-- output: (?P<machine>[\w-]+): (?P<command>gatewise [^\n]*?) -->\n.*?<!-- /output -->", re.DOTALL
)


def main(page: Path, machine: str) -> None:
    """Run the command of every block of a machine, and write what it printed into the page."""

    def filled(block: re.Match[str]) -> str:
        if block["machine"] != machine:
            return block[0]
        return f"<!-- output: {machine}: {block['command']} -->\n{recorded(block['command'])}\n<!-- /output -->"

    write_text(page, BLOCK.sub(filled, page.read_text("utf-8")))


def recorded(command: str) -> str:
    """Return a command's output as Markdown, with its commit and date."""
    words = [sys.executable, "-m", *shlex.split(command)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GATEWISE_")}
    answer = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"```text\n$ {command}\n{answer.stdout.rstrip()}\n```\n\n(Commit {commit()}, {date}.)"


def commit() -> str:
    """Return the short name of the commit that the sources are of."""
    named = os.environ.get("GATEWISE_COMMIT")
    if named:
        return named[:7]
    words = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

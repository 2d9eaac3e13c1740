"""Names of runs, which are also names of folders."""

from __future__ import annotations

from typing import Any

from gatewise.contract.errors import ArgumentError, sentence

_LONGEST = 200
"""The longest name in bytes: file systems allow 255, and a number may be appended."""


class FolderName:
    """The rule that the name of a run is the name of one folder under `runs/`."""

    def check(self, name: str, value: Any) -> None:
        """Check that a name is the plain name of a folder.

        Raises:
            ArgumentError: The name is empty, too long, has separators or control characters, or refers to another
                folder.
        """
        plain = value.isprintable() and not set(value) & set("/\\:") and value.strip(" .") and value == value.strip()
        if not plain or len(value.encode("utf-8", "replace")) > _LONGEST:
            advice = "The run goes to runs/NAME; `--output` takes any other path."
            raise ArgumentError(sentence(name, "a plain folder name, without / and \\", repr(value), advice))


FOLDER_NAME = FolderName()

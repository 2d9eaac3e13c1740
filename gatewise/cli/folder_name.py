"""Names of runs, which are names of folders too."""

from __future__ import annotations

from typing import Any

from gatewise.contract.errors import ArgumentError, sentence

_LONGEST = 200
"""Bytes of a name: file systems take 255, and a number may follow."""


class FolderName:
    """The rule that the name of a run leads nowhere but into one folder under `runs/`."""

    def check(self, name: str, value: Any) -> None:
        """Refuse what is no plain name of a folder.

        Raises:
            ArgumentError: The name is empty, too long, has separators or control characters, or means another folder.
        """
        plain = value.isprintable() and not set(value) & set("/\\:") and value.strip(" .") and value == value.strip()
        if not plain or len(value.encode("utf-8", "replace")) > _LONGEST:
            advice = "The run goes to runs/NAME; `--output` takes any other path."
            raise ArgumentError(sentence(name, "a plain folder name, without / and \\", repr(value), advice))


FOLDER_NAME = FolderName()

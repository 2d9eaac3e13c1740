"""The list of files in a folder that gatewise wrote, which is read before anything is replaced or deleted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from gatewise.contract.errors import CheckpointError, FolderError
from gatewise.files import write_text
from gatewise.training.json_values import to_json

_ABOUT = (
    "This folder holds a run of gatewise. The files listed here are the run's own: the run replaces them, and "
    "--overwrite deletes them. No other file in this folder is replaced or deleted."
)
_SHOWN = 8
"""The largest number of file names in an error."""


class Manifest:
    """The list of the files in a folder that gatewise may replace and delete.

    Args:
        folder: The folder of a run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gatewise-run.json"
        self._folder = folder

    def files(self) -> list[Path]:
        """Return the files that belong to the run, whether they exist or not.

        Raises:
            CheckpointError: The list cannot be read, or was not written by gatewise.
        """
        try:
            names = json.loads(self.path.read_text("utf-8"))["files"]
            safe = all(_is_within(name) for name in names)
        except FileNotFoundError:
            return []
        except NotADirectoryError:  # the folder is a file, which is an error when the folder is written
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}. Check its permissions.") from error
        except (ValueError, KeyError, TypeError):
            safe, names = False, []
        if not safe:
            raise CheckpointError(
                f"{self.path} is damaged, or was not written by gatewise: it does not list the files of a run. Choose "
                "another `--output`, or move it away."
            )
        return [self._folder / name for name in names]

    def foreign(self, files: Iterable[Path]) -> list[Path]:
        """Return the given files that exist and do not belong to the run."""
        own = set(self.files())
        return [file for file in files if file not in own and (file.exists() or file.is_symlink())]

    def claim(self, files: Iterable[Path]) -> None:
        """Add files to the list before they are written.

        Raises:
            FolderError: Some of them exist and were not written by gatewise; the list is unchanged.
            CheckpointError: The list cannot be read or written.
        """
        files = list(files)
        if foreign := self.foreign(files):
            names = ", ".join(file.name for file in foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
            raise FolderError(
                f"`output` must be a folder in which a run may write, got {self._folder}, which has files with the "
                f"names of a run's files that gatewise did not write: {names}. Choose another `--output`, or move them "
                "away; `--overwrite` does not replace them."
            )
        self.add(files)

    def add(self, files: Iterable[Path]) -> None:
        """Add files that the run has written to the list, whether they exist or not.

        Raises:
            CheckpointError: The list cannot be read or written.
        """
        known = self.files()
        if added := [file for file in files if file not in known]:
            names = [file.relative_to(self._folder).as_posix() for file in (*known, *added)]
            write_text(self.path, to_json({"about": _ABOUT, "files": names}, indent=2) + "\n")


def _is_within(name: object) -> bool:
    """Return whether a name stays in the folder, so that a list from elsewhere cannot refer to files outside."""
    # No name of a file can hold NUL or a half of a character.
    possible = isinstance(name, str) and not any(each == "\0" or "\ud800" <= each <= "\udfff" for each in name)
    parts = PurePosixPath(str(name)).parts if possible else ()
    return bool(parts) and not {"..", "/"} & set(parts) and "\\" not in str(name) and ":" not in str(name)

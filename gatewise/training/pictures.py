"""Writing matplotlib figures to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewise.contract.errors import ArgumentError, sentence
from gatewise.files import replacing, written_through

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
"""The suffixes of the files that the options for plots accept."""

FILE_OF_PLOT = "a .png, .svg or .pdf file"
"""Such a file, in the words of help texts and errors."""


def check_picture(name: str, path: Path | None) -> None:
    """Check the file that an option for a plot names, before anything is computed for it.

    Args:
        name: The option.
        path: The file, or None. One such as `/dev/stdout` may have any name, and gets a PNG.

    Raises:
        ArgumentError: The name of the file ends otherwise.
    """
    if path is not None and path.suffix.lower() not in FORMATS and not written_through(path):
        raise ArgumentError(sentence(name, FILE_OF_PLOT, str(path), "The suffix decides the format."))


def save_picture(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure atomically, in the format of the file name's suffix if it is one of `FORMATS`, otherwise as PNG.

    The same figure gives the same file: none contains the time.

    Args:
        figure: The figure.
        path: The file, device or FIFO to write.
        **options: The options of `Figure.savefig`.

    Raises:
        CheckpointError: The file cannot be written; an existing file is unchanged.
    """
    suffix = path.suffix.lower()
    kind = suffix.removeprefix(".") if suffix in FORMATS else "png"
    from matplotlib import rc_context

    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with replacing(path) as temporary, rc_context({"svg.hashsalt": "gatewise"}):
        figure.savefig(temporary, format=kind, metadata=metadata, **options)

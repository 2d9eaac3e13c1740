"""Figures of matplotlib as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewise.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_picture(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure whole or not at all, in the format that the file's name ends with, otherwise as PNG.

    Args:
        figure: The figure.
        path: The file, device or FIFO to write.
        **options: As `Figure.savefig` takes them.

    Raises:
        CheckpointError: The file cannot be written; what it held before is untouched.
    """
    suffix = path.suffix.lower().removeprefix(".")
    kind = suffix if suffix in figure.canvas.get_supported_filetypes() else "png"
    with replacing(path) as temporary:
        figure.savefig(temporary, format=kind, **options)

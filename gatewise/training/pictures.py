"""Writing matplotlib figures to files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewise.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_picture(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure atomically, in the format of the file name's suffix, otherwise as PNG.

    Args:
        figure: The figure.
        path: The file, device or FIFO to write.
        **options: The options of `Figure.savefig`.

    Raises:
        CheckpointError: The file cannot be written; an existing file is unchanged.
    """
    suffix = path.suffix.lower().removeprefix(".")
    kind = suffix if suffix in figure.canvas.get_supported_filetypes() else "png"
    with replacing(path) as temporary:
        figure.savefig(temporary, format=kind, **options)

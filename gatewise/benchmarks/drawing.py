"""The style and the files of plots: readable on white and black pages, and the same for the same records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewise.contract.errors import MissingExtra
from gatewise.training.pictures import save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#6e7781"
"""The colour of text and lines: of medium lightness, as the background is transparent."""

_SUFFIXES = (".png", ".svg")


@contextlib.contextmanager
def inked() -> Iterator[None]:
    """Draw in the colour `INK` inside the context.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise MissingExtra.for_package("matplotlib", "Drawing a plot", "train") from error
    ink: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    )
    with rc_context(ink):
        yield


def save(figure: Figure, prefix: Path) -> list[Path]:
    """Write a plot as PNG and as SVG, and return the files.

    Args:
        figure: The plot.
        prefix: The file name without suffix.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    files = [prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES]
    for file in files:
        save_picture(figure, file, dpi=150, transparent=True)
    return files

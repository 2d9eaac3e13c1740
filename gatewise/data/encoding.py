"""The encoding of a file that is not UTF-8, for the advice in errors."""

from __future__ import annotations

import codecs
from pathlib import Path

HEAD = 4096
"""The number of bytes from which an encoding is guessed."""

WIDE = ("utf-16", "utf-32")
"""The beginnings of the names of encodings with at least two bytes for each character."""

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def encoding_of(head: bytes) -> str:
    """Return the likely encoding of a text, as iconv names it.

    Args:
        head: The first bytes of the text.

    Returns:
        UTF-16 or UTF-32 if the text begins with a byte-order mark, or if many bytes are zero, as in most languages that
        are written in letters; UTF-8 if its bytes can be decoded; otherwise Latin-1.
    """
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    head = head[:HEAD]
    for first, name in ((1, "utf-16le"), (0, "utf-16be")):
        half = head[first::2]
        if half and 4 * half.count(0) > len(half):
            return name
    try:
        # The last character of a longer text may be cut off.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD)
    except UnicodeDecodeError:
        return "latin1"
    return "utf-8"


def conversion(path: Path, encoding: str) -> str:
    """Return the advice to convert a file from an encoding to UTF-8."""
    return f"Convert it first, for example: iconv -f {encoding} -t utf-8 {path} > {path.stem}-utf8{path.suffix}"

"""The encoding of a file that is not UTF-8, for the advice in errors."""

from __future__ import annotations

import codecs
from pathlib import Path
from shlex import quote

HEAD = 4096
"""The number of bytes from which an encoding is guessed."""

BINARY = "binary"
"""The answer of `encoding_of` for bytes that are no text in an encoding that it knows."""

_WIDE = ("utf-16", "utf-32")
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
        UTF-16 or UTF-32 if the text begins with a byte-order mark, or if zeros are where these encodings of most
        languages that are written in letters have them: in every other byte and in no others, or in two or three of
        four. Otherwise `BINARY` if more than a quarter of the bytes are zero; UTF-8 if the bytes can be decoded;
        `BINARY` if they cannot and some are zero; otherwise Latin-1.
    """
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    head = head[:HEAD]
    places = [head[first::4].count(0) for first in range(4)]
    for name, largest in (("utf-32le", 3), ("utf-32be", 0)):
        # Characters above U+FFFF are rare, so that the two largest bytes are zero; in UTF-16 there is a letter there.
        upper = places[largest] + places[largest ^ 1]
        if head and 2 * upper > len(head) * 3 // 4 and "\0" not in _decoded(head, name, "\0"):
            return name
    zeros = [head[first::2].count(0) for first in (0, 1)]
    for first, name in ((1, "utf-16le"), (0, "utf-16be")):
        # Few other characters have a zero in the other byte.
        if 8 * zeros[first] > len(head) and zeros[1 - first] * 16 < zeros[first]:
            return name
    if 4 * sum(zeros) > len(head):
        return BINARY
    try:
        # The last character of a longer text may be cut off.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD)
    except UnicodeDecodeError:
        return BINARY if sum(zeros) else "latin1"
    return "utf-8"


def refusal(path: Path, head: bytes) -> str | None:
    """Return why a file cannot be UTF-8 text, given its first bytes, and what to do; None if it can be.

    Args:
        path: The file.
        head: The first `HEAD` bytes of the file.
    """
    encoding = encoding_of(head)
    if encoding.startswith(_WIDE):
        return f"{path} is not UTF-8, but {encoding.upper()}. {conversion(path, encoding)}"
    if encoding == BINARY:
        zeros = head.count(0)
        return (
            f"{path} must be text in UTF-8, got a file that holds {zeros:,} NUL characters in its first {len(head):,} "
            f"bytes: it is damaged, not text, or text in another encoding. Give another file, or remove them, for "
            f"example: tr -d '\\000' < {quote(str(path))} > {quote(f'{path.stem}-text{path.suffix}')}"
        )
    return None


def conversion(path: Path, encoding: str) -> str:
    """Return the advice to convert a file from an encoding to UTF-8."""
    given, converted = quote(str(path)), quote(f"{path.stem}-utf8{path.suffix}")
    return f"Convert it first, for example: iconv -f {encoding} -t utf-8 {given} > {converted}"


def _decoded(text: bytes, encoding: str, otherwise: str) -> str:
    try:
        return text.decode(encoding)
    except UnicodeDecodeError:
        return otherwise

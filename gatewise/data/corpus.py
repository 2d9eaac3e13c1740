"""A corpus: three texts, one to learn from, one to choose by, one to report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from gatewise.contract.errors import ArgumentError, CorpusError, sentence

SHARES = (0.9, 0.05, 0.05)
"""How one text is divided into training, validation and test text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    """Text in its three parts.

    Attributes:
        name: What it is, in a few words.
        train: The text to learn from; vocabularies are built from it alone.
        valid: The text that decides when to stop and which weights to keep.
        test: The text that is looked at once, at the end.
    """

    name: str
    train: str
    valid: str
    test: str


def corpus_from_files(train: str | Path, valid: str | Path, test: str | Path) -> Corpus:
    """Read a corpus that is already divided into three UTF-8 files.

    Args:
        train: Path of the training text.
        valid: Path of the validation text.
        test: Path of the test text.

    Returns:
        The three texts as they stand.

    Raises:
        CorpusError: A file is missing, empty or not UTF-8.
    """
    return Corpus(Path(train).name, read_text(train), read_text(valid), read_text(test))


def corpus_from_file(path: str | Path, shares: Sequence[float] = SHARES) -> Corpus:
    """Read one UTF-8 file and divide it, in its own order, into three parts.

    The text is cut at ends of lines: the first part is for training, the next for validation, the last for testing.

    Args:
        path: Path of the text.
        shares: Fractions of the characters for training, validation and test; they sum to 1.

    Returns:
        The divided text.

    Raises:
        CorpusError: The file is missing, empty or not UTF-8, or has too few lines for three parts.
        ArgumentError: The shares are not three positive numbers that sum to 1.
    """
    return divide(Path(path).name, read_text(path), shares)


def python_topics() -> Corpus:
    """Return the help pages that every Python carries, divided by `SHARES`.

    These are the texts behind `help("topics")`, in alphabetical order of topic. Many paragraphs stand in several
    topics; only the first occurrence is kept, so that nothing in the validation or test text was learned by heart.

    Returns:
        About 350,000 characters; the exact text depends on the version of Python.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    pages = []
    for name in sorted(topics):
        page = []
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                page.append(paragraph.rstrip())
        pages.append("\n\n".join(page).strip("\n"))
    return divide("the help pages of Python", "\n\n".join(pages) + "\n", SHARES)


def divide(name: str, text: str, shares: Sequence[float]) -> Corpus:
    """Cut a text at ends of lines into consecutive parts with these shares of its characters."""
    if len(shares) != 3 or min(shares) <= 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise ArgumentError(
            sentence("shares", "three positive numbers that sum to 1", tuple(shares), f"The default is {SHARES}.")
        )
    first = text.rfind("\n", 0, round(len(text) * shares[0])) + 1
    second = text.rfind("\n", first, round(len(text) * (shares[0] + shares[1]))) + 1
    parts = text[:first], text[first:second], text[second:]
    if not all(part.strip() for part in parts):
        raise CorpusError(
            f"{name} has too few lines to be divided into training, validation and test text. "
            "Give a longer text, or three files."
        )
    return Corpus(name, *parts)


def read_text(path: str | Path) -> str:
    r"""Read a UTF-8 text file, or say exactly why it cannot be read.

    A byte-order mark is dropped; line ends become ``\\n``.

    Args:
        path: The file.

    Returns:
        Its text.

    Raises:
        CorpusError: The file is missing, not a file, unreadable, empty, or not UTF-8 (with the offset of the first
            byte that is not).
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CorpusError(f"there is no text file {path}. Check the path.") from None
    except IsADirectoryError:
        raise CorpusError(f"{path} is a folder, not a text file. Name the file in it.") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        raise CorpusError(
            f"{path} is not UTF-8: byte {offset} is 0x{raw[offset]:02x}. "
            f"Convert it first, for example: iconv -f latin1 -t utf-8 {path} > {path.stem}-utf8.txt"
        ) from None
    if not text.strip():
        raise CorpusError(f"{path} is empty. Give a file with text in it.")
    return text.replace("\r\n", "\n").replace("\r", "\n")

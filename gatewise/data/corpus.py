"""A text corpus, split into a training, a validation and a test text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from gatewise.contract.errors import ArgumentError, CorpusError, sentence
from gatewise.data.encoding import HEAD, conversion, refusal
from gatewise.files import irregular

SHARES = (0.9, 0.05, 0.05)
"""The fractions of a text that become training, validation and test text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    """A corpus split into three texts.

    Attributes:
        name: A short description of the corpus.
        train: The training text; vocabularies are built from it alone.
        valid: The validation text, used for early stopping and for selecting the best weights.
        test: The test text, evaluated once after training.
    """

    name: str
    train: str
    valid: str
    test: str


def corpus_from_files(train: str | Path, valid: str | Path, test: str | Path) -> Corpus:
    """Read a corpus that is already split into three UTF-8 files.

    Args:
        train: Path of the training text.
        valid: Path of the validation text.
        test: Path of the test text.

    Returns:
        The three texts, unchanged.

    Raises:
        CorpusError: A file is missing, empty or not UTF-8.
    """
    return Corpus(Path(train).name, read_text(train), read_text(valid), read_text(test))


def corpus_from_file(path: str | Path, shares: Sequence[float] = SHARES) -> Corpus:
    """Read one UTF-8 file and split it into three consecutive parts.

    The text is split at line ends: the first part is for training, the next for validation, the last for testing.

    Args:
        path: Path of the text.
        shares: Fractions of the characters for training, validation and test; they sum to 1.

    Returns:
        The corpus.

    Raises:
        CorpusError: The file is missing, empty or not UTF-8, or has too few lines for three parts.
        ArgumentError: The shares are not three positive numbers that sum to 1.
    """
    return divide(Path(path).name, read_text(path), shares)


def python_topics() -> Corpus:
    """Return the help pages that come with Python, split by `SHARES`.

    These are the texts behind `help("topics")`, in alphabetical order of topic. Many paragraphs occur in several
    topics; only the first occurrence is kept, so that no validation or test paragraph occurs in the training text.

    Returns:
        A corpus of about 350,000 characters; the exact text depends on the version of Python.
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
    """Split a text at line ends into consecutive parts that hold the given fractions of its characters."""
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
    r"""Read a UTF-8 text file.

    A byte-order mark is dropped; line ends become ``\\n``.

    Args:
        path: The path of the file.

    Returns:
        The text of the file.

    Raises:
        CorpusError: The file is missing, no regular file, unreadable, empty, or not UTF-8 (with the offset of the first
            byte that is not).
    """
    path = Path(path)
    if reason := irregular(path):
        raise CorpusError(reason)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CorpusError(f"there is no text file {path}. Check the path.") from None
    except IsADirectoryError:
        raise CorpusError(f"{path} is a folder, not a text file. Name the file in it.") from None
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    if reason := refusal(path, raw[:HEAD]):
        raise CorpusError(reason)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        raise CorpusError(
            f"{path} is not UTF-8: byte {offset} is 0x{raw[offset]:02x}. {conversion(path, 'latin1')}"
        ) from None
    if not text.strip():
        raise CorpusError(f"{path} is empty. Give a file with text in it.")
    return text.replace("\r\n", "\n").replace("\r", "\n")

"""Tokenizers for words, characters, bytes and byte-pair encoding.

Decoding is concatenative: `decode(a) + decode(b) == decode(a + b)`, except when the bytes of a UTF-8 character are
split between the two. Text can therefore be shown token by token (see `stream_text`).
"""

from __future__ import annotations

import codecs
import collections
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from gatewise.contract.errors import ArgumentError, CorpusError, sentence

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer(Protocol):
    """The interface of every tokenizer.

    Attributes:
        kind: The name of this kind of tokenizer in `build_tokenizer`.
        unit: The name of one token, in the plural, for reports.
        unknown: The token for text that is not in the vocabulary; None when every text can be encoded.
    """

    kind: str
    unit: str
    unknown: int | None

    def __len__(self) -> int:
        """Return the number of distinct tokens."""
        ...

    def encode(self, text: str) -> torch.Tensor:
        """Return the text as token numbers, int64 [N] on the CPU."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return the text of one token as UTF-8 bytes."""
        ...

    def to_json(self) -> str:
        """Return the JSON document that `load_tokenizer` reads."""
        ...


class WordTokenizer:
    """A tokenizer for words separated by white space; every line ends with `<eos>`.

    Args:
        words: The vocabulary; token n is `words[n]`. It must contain `<unk>` and `<eos>`.
    """

    kind = "word"
    unit = "words"

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._index = {word: token for token, word in enumerate(self._words)}
        for needed in (UNKNOWN, END_OF_LINE):
            if needed not in self._index:
                raise ArgumentError(f"the vocabulary of a word tokenizer must hold {needed}. Add it.")
        self.unknown: int | None = self._index[UNKNOWN]
        self.end_of_line = self._index[END_OF_LINE]

    @classmethod
    def from_text(cls, text: str, size: int | None = None) -> WordTokenizer:
        """Build the vocabulary from the most frequent words of a text; `<unk>` and `<eos>` count towards `size`."""
        counts = collections.Counter(text.split())
        special = (UNKNOWN, END_OF_LINE)
        ranked = sorted(counts.keys() - set(special), key=lambda word: (-counts[word], word))
        return cls([*special, *ranked[: _room(size, len(special))]])

    def __len__(self) -> int:
        return len(self._words)

    def encode(self, text: str) -> torch.Tensor:
        """Return the words of each line, each line followed by `<eos>`, as int64 [N].

        Text after the last line end has no `<eos>`, so that a prompt can be continued within its line.
        """
        *lines, rest = text.split("\n")
        index, unknown = self._index, self._index[UNKNOWN]
        tokens: list[int] = []
        for line in lines:
            tokens.extend(index.get(word, unknown) for word in line.split())
            tokens.append(self.end_of_line)
        tokens.extend(index.get(word, unknown) for word in rest.split())
        return torch.from_numpy(np.array(tokens, dtype=np.int64))  # in a third of the time of `torch.tensor`

    def bytes_of(self, token: int) -> bytes:
        """Return the word followed by a space, or a new line for `<eos>`."""
        _check_token(token, len(self))
        return b"\n" if token == self.end_of_line else self._words[token].encode() + b" "

    def to_json(self) -> str:
        """Return the vocabulary as JSON."""
        return json.dumps({"kind": self.kind, "words": self._words}, ensure_ascii=False)


class CharacterTokenizer:
    """A tokenizer for Unicode characters.

    Args:
        characters: The alphabet without duplicates; character n is token n + 1, and token 0 is an unknown character.
    """

    kind = "character"
    unit = "characters"
    unknown: int | None = 0

    def __init__(self, characters: str) -> None:
        self._characters = "\N{REPLACEMENT CHARACTER}" + characters
        self._index = {character: token for token, character in enumerate(self._characters)}

    @classmethod
    def from_text(cls, text: str, size: int | None = None) -> CharacterTokenizer:
        """Build the alphabet from the most frequent characters of a text; `size` includes the unknown character."""
        counts = collections.Counter(text)
        ranked = sorted(counts.keys() - {"\N{REPLACEMENT CHARACTER}"}, key=lambda one: (-counts[one], one))
        return cls("".join(ranked[: _room(size, 1)]))

    def __len__(self) -> int:
        return len(self._characters)

    def encode(self, text: str) -> torch.Tensor:
        """Return one token per character, int64 [N]."""
        index = self._index
        return torch.tensor([index.get(character, 0) for character in text], dtype=torch.int64)

    def bytes_of(self, token: int) -> bytes:
        """Return the character."""
        _check_token(token, len(self))
        return self._characters[token].encode()

    def to_json(self) -> str:
        """Return the alphabet as JSON."""
        return json.dumps({"kind": self.kind, "characters": self._characters[1:]}, ensure_ascii=False)


class ByteTokenizer:
    """UTF-8 bytes: 256 tokens, nothing unknown, no vocabulary to build."""

    kind = "byte"
    unit = "bytes"
    unknown: int | None = None

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> torch.Tensor:
        """Return one token a byte, int64 [N]."""
        return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long() if text else torch.empty(0).long()

    def bytes_of(self, token: int) -> bytes:
        """Return the byte."""
        _check_token(token, len(self))
        return bytes([token])

    def to_json(self) -> str:
        """Return the kind as JSON; a byte tokenizer has no vocabulary."""
        return json.dumps({"kind": self.kind})


def build_tokenizer(kind: str, text: str, size: int | None = None) -> Tokenizer:
    """Build a tokenizer from the training text.

    Args:
        kind: ``"word"``, ``"character"``, ``"byte"`` or ``"bpe"``.
        text: The training text.
        size: The maximum number of tokens; None keeps every word or character, and means 2,000 for ``"bpe"``.

    Returns:
        The tokenizer.

    Raises:
        ArgumentError: `kind` is not one of the four, or `size` is too small for it.
        MissingExtra: `kind` is ``"bpe"`` and the package `tokenizers` is not installed.
    """
    return _known(kind)(text, size)


def load_tokenizer(document: str) -> Tokenizer:
    """Load a tokenizer from its `to_json()`.

    Args:
        document: The JSON document that `to_json()` returned.

    Returns:
        A tokenizer with the same vocabulary.

    Raises:
        CorpusError: The document is not one that a tokenizer wrote.
    """
    try:
        facts = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise _foreign(f"it is not JSON ({error})") from error
    if not isinstance(facts, dict):
        raise _foreign(sentence("the document", "a JSON object", shortened(facts)))
    kind = facts.get("kind")
    if kind == "word":
        if not _distinct(facts.get("words"), list):
            raise _foreign(sentence("words", "a list of different strings", shortened(facts.get("words"))))
        try:
            return WordTokenizer(facts["words"])
        except ArgumentError as error:
            raise _foreign(str(error)) from error
    if kind == "character":
        if not _distinct(facts.get("characters"), str):
            got = shortened(facts.get("characters"))
            raise _foreign(sentence("characters", "a string of different characters", got))
        return CharacterTokenizer(facts["characters"])
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        from gatewise.data.bpe import BpeTokenizer

        try:
            return BpeTokenizer(json.dumps(facts.get("model")))
        except ArgumentError as error:
            raise _foreign(str(error)) from error
    raise _foreign(sentence("kind", f"one of {', '.join(TOKENIZERS)}", shortened(kind)))


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield text as tokens arrive; bytes are held back until a character is complete.

    Args:
        tokenizer: The tokenizer of the tokens.
        tokens: The token numbers, possibly without end.

    Yields:
        Pieces of text, none of them empty.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if piece := decoder.decode(tokenizer.bytes_of(token)):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest


def unknown_parts(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the words or characters of a text that its tokenizer does not know, each once, in their order.

    Args:
        tokenizer: The tokenizer.
        text: The text; `<unk>` itself, which a text may contain for rare words, counts as known.

    Returns:
        Words if the tokens are words, otherwise characters; nothing if the tokenizer can encode every text.
    """
    if tokenizer.unknown is None:
        return []
    parts = dict.fromkeys(text.split() if tokenizer.kind == WordTokenizer.kind else text)
    return [part for part in parts if part != UNKNOWN and tokenizer.unknown in tokenizer.encode(part).tolist()]


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Return the text of some tokens."""
    return "".join(stream_text(tokenizer, tokens))


def _check_token(token: int, size: int) -> None:
    if not 0 <= token < size:
        raise ArgumentError(sentence("token", f"in [0, {size})", token, "Read it with its own vocabulary."))


def _bpe_from_text(text: str, size: int | None) -> Tokenizer:
    from gatewise.data.bpe import BpeTokenizer

    return BpeTokenizer.from_text(text, size)


def _bytes_from_text(text: str, size: int | None) -> Tokenizer:
    if size not in (None, 256):
        raise ArgumentError(sentence("vocabulary_size", "256 for bytes", size, "Leave it out."))
    return ByteTokenizer()


TOKENIZERS: dict[str, Callable[[str, int | None], Tokenizer]] = {
    "word": WordTokenizer.from_text,
    "character": CharacterTokenizer.from_text,
    "byte": _bytes_from_text,
    "bpe": _bpe_from_text,
}
"""The function that builds each kind of tokenizer from a text and a size."""


def shortened(value: object) -> str:
    """Return the text of an unexpected value of a document, on one line of limited length."""
    return reprlib.repr(value)


def _foreign(what: str) -> CorpusError:
    return CorpusError(f"this is not a tokenizer that gatewise wrote: {what}")


def _distinct(parts: object, kind: type[list[str]] | type[str]) -> bool:
    """Return whether something is a list, or a string, of different parts that can be written as UTF-8."""
    if not isinstance(parts, kind) or not all(isinstance(part, str) for part in parts):
        return False
    return len({*parts}) == len(parts) and not _SURROGATE.search("".join(parts))


def _known(kind: str) -> Callable[[str, int | None], Tokenizer]:
    if kind not in TOKENIZERS:
        raise ArgumentError(sentence("tokens", f"one of {', '.join(TOKENIZERS)}", repr(kind)))
    return TOKENIZERS[kind]


def _room(size: int | None, special: int) -> int | None:
    if size is None:
        return None
    if size <= special:
        raise ArgumentError(
            sentence("vocabulary_size", f"more than {special}", size, "Leave it out to keep everything.")
        )
    return size - special

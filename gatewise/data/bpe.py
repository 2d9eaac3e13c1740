"""Byte-pair encoding through the `tokenizers` library."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence

import torch

from gatewise.contract.errors import ArgumentError, MissingExtra, sentence

DEFAULT_SIZE = 2000


class BpeTokenizer:
    """A byte-level byte-pair encoding, which can represent any text and needs no unknown token.

    Args:
        model: The JSON document that `tokenizers.Tokenizer.to_str()` returns.

    Raises:
        ArgumentError: The document is not one of a byte-level byte-pair encoding.
        MissingExtra: The package `tokenizers` is not installed.

    References:
        Sennrich, Haddow, Birch: Neural Machine Translation of Rare Words with Subword Units, 2016, section 3.2.
    """

    kind = "bpe"
    unit = "tokens"
    unknown: int | None = None

    def __init__(self, model: str) -> None:
        library = _library()
        try:
            self._model = library.Tokenizer.from_str(model)
        except Exception as error:  # the library raises no narrower class
            raise _foreign(str(error)) from error
        vocabulary = self._model.get_vocab()
        if sorted(vocabulary.values()) != list(range(len(vocabulary))):
            raise _foreign("one whose tokens are not numbered from 0")
        if letters := {*"".join(vocabulary)} - _byte_of_letter().keys():
            raise _foreign(f"one in which {min(letters)!r} stands for no byte")

    @classmethod
    def from_text(cls, text: str, size: int | None = None) -> BpeTokenizer:
        """Learn merges from a text until the vocabulary has `size` tokens (default 2,000, at least 256)."""
        size = DEFAULT_SIZE if size is None else size
        if size < 256:
            raise ArgumentError(sentence("vocabulary_size", "at least 256 for bpe", size, "Every byte is a token."))
        library = _library()
        model = library.Tokenizer(library.models.BPE())
        model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        model.train_from_iterator(text.splitlines(keepends=True), trainer)
        return cls(model.to_str())

    def __len__(self) -> int:
        return self._model.get_vocab_size()

    def encode(self, text: str) -> torch.Tensor:
        """Return the tokens of the text, int64 [N]."""
        pieces = self._model.encode_batch_fast(text.splitlines(keepends=True), add_special_tokens=False)
        return torch.tensor([token for piece in pieces for token in piece.ids], dtype=torch.int64)

    def encode_lines(self, lines: Sequence[str], first: int = 0) -> list[torch.Tensor]:
        """Return the tokens of each line, int64 [N], computed on all CPU cores.

        Args:
            lines: The lines.
            first: The number that is added to each token.
        """
        pieces = [piece.ids for piece in self._model.encode_batch_fast(lines, add_special_tokens=False)]
        tokens = torch.tensor(list(itertools.chain.from_iterable(pieces)), dtype=torch.int64) + first
        return list(tokens.split([len(piece) for piece in pieces]))  # one tensor for each line would take far longer

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that the token represents."""
        table = _byte_of_letter()
        letters = self._model.id_to_token(token) if token >= 0 else None
        if letters is None:
            raise ArgumentError(sentence("token", f"in [0, {len(self)})", token, "Read it with its own vocabulary."))
        return bytes(table[letter] for letter in letters)

    def to_json(self) -> str:
        """Return the JSON document of the `tokenizers` library with the kind of this tokenizer added."""
        return json.dumps({"kind": self.kind, "model": json.loads(self._model.to_str())}, ensure_ascii=False)


def _foreign(got: str) -> ArgumentError:
    expectation = "the JSON document of a byte-level byte-pair encoding of the package tokenizers"
    return ArgumentError(sentence("model", expectation, got))


@functools.cache
def _byte_of_letter() -> dict[str, int]:
    """Return the byte for each printable character that byte-level tokenizers write in its place.

    Printable bytes keep their own character; the others are assigned the characters from U+0100 on, in order.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    table = {chr(byte): byte for byte in printing}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return table


def _library():  # noqa: ANN202 - the type is the optional module itself
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise MissingExtra.for_package("tokenizers", "byte-pair encoding", "train") from None
    return tokenizers

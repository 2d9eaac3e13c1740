"""Single sentences as token numbers, with a beginning and an end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch

from gatewise.contract.errors import ArgumentError, CorpusError, sentence
from gatewise.data.bpe import BpeTokenizer
from gatewise.data.parallel import ParallelText
from gatewise.data.tokenizers import Tokenizer, build_tokenizer, decode, load_tokenizer

PADDING, BEGINNING, END = 0, 1, 2
"""Tokens that stand for no text: beyond the end, before the first token, after the last one."""
_SPECIAL = 3

VOCABULARIES = ("joint", "separate")


class SentenceVocabulary:
    """The tokens of a tokenizer, and three more: padding, beginning and end of a sentence.

    Every word of a sentence stands behind a space, the first one too, so that a word has the same tokens wherever it
    stands.

    Args:
        tokenizer: Of words, characters, bytes or byte pairs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def unit(self) -> str:
        """What one token is, in the plural."""
        return self.tokenizer.unit

    @property
    def unknown(self) -> int | None:
        """The token of what the vocabulary lacks; None when nothing can be lacking."""
        return None if self.tokenizer.unknown is None else self.tokenizer.unknown + _SPECIAL

    def __len__(self) -> int:
        return len(self.tokenizer) + _SPECIAL

    def encode(self, text: str) -> torch.Tensor:
        """Return the tokens of one sentence without beginning and end, int64 [N]."""
        return self.tokenizer.encode(_spaced(text)) + _SPECIAL

    def encode_all(self, sentences: Sequence[str]) -> list[torch.Tensor]:
        """Return the tokens of every sentence; byte pairs are looked for in many at a time."""
        if isinstance(self.tokenizer, BpeTokenizer):
            return [tokens + _SPECIAL for tokens in self.tokenizer.encode_lines([_spaced(each) for each in sentences])]
        return [self.encode(each) for each in sentences]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the sentence of some tokens; the three special ones have no text."""
        text = decode(self.tokenizer, (token - _SPECIAL for token in tokens if token >= _SPECIAL))
        return " ".join(text.split())

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return every token by itself, for people to look at; the end of the sentence too."""
        special = {PADDING: "<pad>", BEGINNING: "<s>", END: "</s>"}
        return [
            special[token]
            if token in special
            else self.tokenizer.bytes_of(token - _SPECIAL).decode("utf-8", "backslashreplace").strip() or "_"
            for token in tokens
        ]


def build_vocabularies(
    kind: str, pairs: ParallelText, size: int | None = None, sharing: str = "separate"
) -> tuple[SentenceVocabulary, SentenceVocabulary]:
    """Build the vocabularies of both sides from the training pairs.

    Args:
        kind: ``"bpe"``, ``"word"``, ``"character"`` or ``"byte"``.
        pairs: The training pairs.
        size: The largest vocabulary in tokens, of each side when they are separate; see `build_tokenizer`.
        sharing: ``"joint"``, one vocabulary from both sides together; or ``"separate"``.

    Returns:
        The vocabularies of source and target; the same object when they are joint.
    """
    if sharing not in VOCABULARIES:
        raise ArgumentError(sentence("vocabulary", f"one of {', '.join(VOCABULARIES)}", repr(sharing)))
    if sharing == "joint":
        both = SentenceVocabulary(build_tokenizer(kind, _text((*pairs.source, *pairs.target)), size))
        return both, both
    source, target = (
        SentenceVocabulary(build_tokenizer(kind, _text(side), size)) for side in (pairs.source, pairs.target)
    )
    return source, target


def vocabularies_to_json(source: SentenceVocabulary, target: SentenceVocabulary) -> str:
    """Return everything that `load_vocabularies` needs; a joint vocabulary is written once.

    Args:
        source: What sentences are read with.
        target: What translations are written with; the same object where both share one.
    """
    documents = {"source": json.loads(source.tokenizer.to_json())}
    if target is not source:
        documents["target"] = json.loads(target.tokenizer.to_json())
    return json.dumps(documents, ensure_ascii=False)


def load_vocabularies(document: str) -> tuple[SentenceVocabulary, SentenceVocabulary]:
    """Rebuild the vocabularies of both sides.

    Args:
        document: From `vocabularies_to_json`.

    Returns:
        The source's and the target's; one object twice where both share one.

    Raises:
        CorpusError: The document is not one that `vocabularies_to_json` wrote.
    """
    try:
        documents = json.loads(document)
        source = SentenceVocabulary(load_tokenizer(json.dumps(documents["source"])))
        if "target" not in documents:
            return source, source
        return source, SentenceVocabulary(load_tokenizer(json.dumps(documents["target"])))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CorpusError(f"these are not vocabularies that gatewise wrote: {error}.") from error


def encode_all(vocabulary: SentenceVocabulary, sentences: Sequence[str]) -> list[torch.Tensor]:
    """Return the tokens of every sentence, as `SentenceVocabulary.encode` does one by one.

    Args:
        vocabulary: Of the sentences' side.
        sentences: Plain texts.
    """
    return vocabulary.encode_all(sentences)


def _text(sentences: Iterable[str]) -> str:
    return "\n".join(map(_spaced, sentences))


def _spaced(text: str) -> str:
    return "".join(f" {word}" for word in text.split())

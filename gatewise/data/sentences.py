"""Single sentences as token numbers, with begin and end tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch

from gatewise.contract.errors import ArgumentError, CorpusError, sentence
from gatewise.data.bpe import BpeTokenizer
from gatewise.data.parallel import ParallelText
from gatewise.data.tokenizers import Tokenizer, build_tokenizer, decode, load_tokenizer, shortened

PADDING, BEGINNING, END = 0, 1, 2
"""The tokens that stand for no text: padding, the begin of a sentence, the end of a sentence."""
_SPECIAL = 3

VOCABULARIES = ("joint", "separate")


class SentenceVocabulary:
    """The vocabulary of a tokenizer with three more tokens: padding, begin and end of a sentence.

    Every word of a sentence, the first one included, is encoded with a space before it, so that a word has the same
    tokens wherever it occurs.

    Args:
        tokenizer: The tokenizer for words, characters, bytes or byte pairs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def unit(self) -> str:
        """The name of one token, in the plural."""
        return self.tokenizer.unit

    @property
    def unknown(self) -> int | None:
        """The token for text that is not in the vocabulary; None when every text can be encoded."""
        return None if self.tokenizer.unknown is None else self.tokenizer.unknown + _SPECIAL

    def __len__(self) -> int:
        return len(self.tokenizer) + _SPECIAL

    def encode(self, text: str) -> torch.Tensor:
        """Return the tokens of one sentence without begin and end, int64 [N]."""
        return self.tokenizer.encode(_spaced(text)) + _SPECIAL

    def encode_all(self, sentences: Sequence[str]) -> list[torch.Tensor]:
        """Return the tokens of every sentence; byte-pair encoding processes many sentences at a time."""
        if isinstance(self.tokenizer, BpeTokenizer):
            return self.tokenizer.encode_lines([_spaced(each) for each in sentences], _SPECIAL)
        return [self.encode(each) for each in sentences]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of some tokens; the three special tokens have no text."""
        text = decode(self.tokenizer, (token - _SPECIAL for token in tokens if token >= _SPECIAL))
        return " ".join(text.split())

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return the text of every token separately, for display; special tokens are shown too."""
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
    """Build the vocabularies of source and target from the training pairs.

    Args:
        kind: ``"bpe"``, ``"word"``, ``"character"`` or ``"byte"``.
        pairs: The training pairs.
        size: The maximum number of tokens, for each side when they are separate; see `build_tokenizer`.
        sharing: ``"joint"`` for one vocabulary of both sides, or ``"separate"``.

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
    """Return the JSON document that `load_vocabularies` reads; a joint vocabulary is written once.

    Args:
        source: The vocabulary of the source.
        target: The vocabulary of the target; the same object when it is joint.
    """
    documents = {"source": json.loads(source.tokenizer.to_json())}
    if target is not source:
        documents["target"] = json.loads(target.tokenizer.to_json())
    return json.dumps(documents, ensure_ascii=False)


def load_vocabularies(document: str) -> tuple[SentenceVocabulary, SentenceVocabulary]:
    """Load the vocabularies of source and target.

    Args:
        document: The JSON document from `vocabularies_to_json`.

    Returns:
        The vocabularies of source and target; the same object twice when it is joint.

    Raises:
        CorpusError: The document is not one that `vocabularies_to_json` wrote.
    """
    try:
        documents = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"these are not vocabularies that gatewise wrote: it is not JSON ({error})") from error
    if not isinstance(documents, dict) or "source" not in documents:
        got = shortened(documents)
        what = sentence("the document", "a JSON object with `source` and, unless it is joint, `target`", got)
        raise CorpusError(f"these are not vocabularies that gatewise wrote: {what}")
    source = SentenceVocabulary(load_tokenizer(json.dumps(documents["source"])))
    if "target" not in documents:
        return source, source
    return source, SentenceVocabulary(load_tokenizer(json.dumps(documents["target"])))


def encode_all(vocabulary: SentenceVocabulary, sentences: Sequence[str]) -> list[torch.Tensor]:
    """Return the tokens of every sentence, the same as `SentenceVocabulary.encode` returns for each.

    Args:
        vocabulary: The vocabulary of the sentences' language.
        sentences: The sentences as plain text.
    """
    return vocabulary.encode_all(sentences)


def _text(sentences: Iterable[str]) -> str:
    return "\n".join(map(_spaced, sentences))


def _spaced(text: str) -> str:
    words = " ".join(text.split())
    return f" {words}" if words else ""

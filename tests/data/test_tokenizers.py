"""Tokenizers: the text that they preserve or lose, and their errors."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatewise.contract.errors import ArgumentError, CorpusError
from gatewise.data import TOKENIZERS, build_tokenizer, load_tokenizer, stream_text
from gatewise.data.tokenizers import decode, unknown_parts

TEXT = "the cat sat on the mat .\nthe dog — über 3 cats 🙂 .\n" * 20


@functools.cache
def built(kind, text=TEXT, size=None):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
        size = size or 300
    return build_tokenizer(kind, text, size)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_its_own_text_comes_back(kind):
    tokenizer = built(kind)
    text = decode(tokenizer, tokenizer.encode(TEXT).tolist())
    if kind == "word":  # a space follows every word
        text = text.replace(" \n", "\n")
    assert text == TEXT


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_it_survives_json(kind):
    tokenizer = built(kind)
    again = load_tokenizer(tokenizer.to_json())
    assert again.to_json() == tokenizer.to_json()
    assert len(again) == len(tokenizer)
    assert again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_token_is_below_its_size(kind):
    tokenizer = built(kind)
    tokens = tokenizer.encode(TEXT + "unseen ☃\n")
    assert 0 <= tokens.min() <= tokens.max() < len(tokenizer)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_text_is_no_tokens(kind):
    assert built(kind).encode("").tolist() == []


# Any characters, by their numbers, of which half are those of ASCII: Hypothesis takes seconds to list them by category.
CHARACTERS = st.one_of(st.integers(0, 127), st.integers(0, 0x10FFFF)).map(chr)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@settings(max_examples=50, deadline=None)
@given(text=st.text(CHARACTERS))
def test_bytes_and_bpe_write_any_text(kind, text):
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = built(kind)
    assert decode(tokenizer, tokenizer.encode(text).tolist()) == text


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_stream_holds_back_half_a_character(kind):
    tokenizer = built(kind, "abc\n" * 100)
    pieces = list(stream_text(tokenizer, tokenizer.encode("a🙂b").tolist()))
    assert pieces == ["a", "🙂", "b"]


def test_a_broken_character_is_replaced_not_raised():
    tokenizer = built("byte")
    assert decode(tokenizer, [0xF0, 0x9F, ord("a"), 0xC3]) == "\N{REPLACEMENT CHARACTER}a\N{REPLACEMENT CHARACTER}"


def test_words_have_an_end_of_line_and_an_unknown():
    tokenizer = built("word", "a a b\n\na\n")
    unknown, end = tokenizer.unknown, tokenizer.end_of_line
    a, b = (tokenizer.encode(word).item() for word in "ab")
    assert tokenizer.encode("a b\n\nc a").tolist() == [a, b, end, end, unknown, a]
    assert len(tokenizer) == 4


def test_words_of_the_text_named_like_special_ones_are_these():
    tokenizer = built("word", "<unk> a <unk> b <eos>\n")
    assert len(tokenizer) == 4
    assert tokenizer.encode("<unk>").item() == tokenizer.unknown


def test_size_keeps_the_most_frequent():
    words = built("word", "a a a b b c\n", 4)
    assert words.encode("a b c").tolist()[2] == words.unknown
    assert words.encode("a b").tolist().count(words.unknown) == 0
    characters = built("character", "aaabbc", 3)
    assert characters.encode("abc").tolist()[2] == characters.unknown


@pytest.mark.parametrize("kind", ["word", "character", "byte", "bpe"])
def test_a_token_of_another_vocabulary_is_refused(kind):
    tokenizer = built(kind)
    for token in (len(tokenizer), -1):
        with pytest.raises(ArgumentError, match=rf"`token` must be in \[0, {len(tokenizer)}\), got {token}\. "):
            tokenizer.bytes_of(token)


def test_size_bounds_bpe():
    pytest.importorskip("tokenizers")
    small, large = built("bpe", size=260), built("bpe", size=280)
    assert len(small) == 260
    assert len(large) == 280
    assert len(large.encode(TEXT)) < len(small.encode(TEXT))


def test_an_unknown_kind_lists_the_known():
    with pytest.raises(ArgumentError, match="`tokens` must be one of word, character, byte, bpe, got 'syllable'"):
        build_tokenizer("syllable", TEXT)


@pytest.mark.parametrize(("kind", "size"), [("word", 2), ("character", 1), ("byte", 255), ("bpe", 255)])
def test_a_vocabulary_that_is_too_small_is_refused(kind, size):
    with pytest.raises(ArgumentError, match="`vocabulary_size` must be"):
        built(kind, size=size)


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ("", "it is not JSON (Expecting value"),
        ("[" * 100_000, "it is not JSON ("),
        ("[]", "`the document` must be a JSON object, got []."),
        ("{}", "`kind` must be one of word, character, byte, bpe, got None."),
        ('{"kind": ["word"]}', "`kind` must be one of word, character, byte, bpe, got ['word']."),
        ('{"kind": "word"}', "`words` must be a list of different strings, got None."),
        ('{"kind": "word", "words": [1, 2]}', "`words` must be a list of different strings, got [1, 2]."),
        ('{"kind": "word", "words": ["<unk>", "<eos>", "<eos>"]}', "`words` must be a list of different strings"),
        ('{"kind": "word", "words": ["a"]}', "the vocabulary of a word tokenizer must hold <unk>."),
        ('{"kind": "word", "words": ["<unk>", "<eos>", "\\ud800"]}', "`words` must be a list of different strings"),
        ('{"kind": "character", "characters": 3}', "`characters` must be a string of different characters, got 3."),
        ('{"kind": "bpe", "model": 3}', "`model` must be the JSON document of a byte-level byte-pair encoding"),
    ],
)
def test_a_foreign_document_is_refused(document, what):
    with pytest.raises(CorpusError) as error:
        load_tokenizer(document)
    assert str(error.value).startswith(f"this is not a tokenizer that gatewise wrote: {what}")


def test_a_byte_pair_encoding_of_others_is_refused():
    document = json.loads(built("bpe", size=260).to_json())
    vocabulary = document["model"]["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    for changed, what in (
        (vocabulary | {last: 999}, "one whose tokens are not numbered from 0"),
        (
            {**{token: n for token, n in vocabulary.items() if token != last}, "\u4eac": 259},
            "'\u4eac' stands for no byte",
        ),
    ):
        document["model"]["model"] |= {"vocab": changed, "merges": []}
        with pytest.raises(CorpusError, match=what):
            load_tokenizer(json.dumps(document))


def test_the_words_are_plain_json():
    assert json.loads(built("word", "é\n").to_json())["words"] == ["<unk>", "<eos>", "é"]


@pytest.mark.parametrize(
    ("kind", "unknown"),
    [("word", ["owl", "sat.", "é"]), ("character", ["w", "l", "é"]), ("byte", []), ("bpe", [])],
)
def test_what_a_tokenizer_does_not_know_of_a_text_is_named(kind, unknown):
    assert unknown_parts(built(kind), "the owl owl sat. é on the cat") == unknown
    assert unknown_parts(built(kind), TEXT) == []
    assert unknown_parts(built("word"), "the <unk> cat") == []

"""Corpora: reading, splitting, and errors for texts that cannot be used."""

from __future__ import annotations

import sys

import pytest

from gatewise.contract.errors import ArgumentError, CorpusError
from gatewise.data import corpus_from_file, corpus_from_files, python_topics, read_text
from gatewise.data.corpus import divide
from gatewise.data.encoding import HEAD, encoding_of


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"there is no text file .*absent\.txt"):
        read_text(tmp_path / "absent.txt")


def test_a_folder_is_not_a_text(tmp_path):
    with pytest.raises(CorpusError, match="is a folder, not a text file"):
        read_text(tmp_path)


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CorpusError, match=r"text cannot be read: Not a directory\. Check the path and its permissions\."
    ):
        read_text(tmp_path / "file" / "text")


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"empty\.txt is empty"):
        read_text(path)


@pytest.mark.parametrize(("mark", "offset"), [(b"", 3), (b"\xef\xbb\xbf", 6)])
def test_the_first_byte_that_is_not_utf8_is_found(tmp_path, mark, offset):
    path = tmp_path / "latin1.txt"
    path.write_bytes(mark + "caf\u00e9 noir".encode("latin1"))
    with pytest.raises(CorpusError, match=f"is not UTF-8: byte {offset} is 0xe9.*iconv"):
        read_text(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16le", "utf-16be", "utf-32", "utf-32le", "utf-32be"])
def test_the_advice_names_the_encoding(tmp_path, encoding):
    path = tmp_path / "notes.txt"
    path.write_bytes("caf\u00e9 noir\n".encode(encoding))
    with pytest.raises(CorpusError) as error:
        read_text(path)
    command = f"iconv -f {encoding} -t utf-8 {path} > notes-utf8.txt"
    assert str(error.value) == f"{path} is not UTF-8, but {encoding.upper()}. Convert it first, for example: {command}"


@pytest.mark.parametrize("encoding", ["utf-16le", "utf-16be", "utf-32le", "utf-32be"])
def test_every_second_character_may_be_a_line_end(encoding):
    assert encoding_of(("1\n0\n" * 99).encode(encoding)) == encoding


def test_a_text_in_utf8_is_not_taken_for_another(tmp_path):
    for text in ("caf\u00e9", "\u65e5\u672c", "a zero\0 here", "", "\u20ac" * HEAD):
        assert encoding_of(text.encode()) == "utf-8"
    assert encoding_of("caf\u00e9".encode("latin1")) == "latin1"


@pytest.mark.parametrize(
    "content",
    [
        b"a hole" + bytes(100) + b"in a text\n",
        b"\0".join(b"a cat sat".split()) + bytes(9),
        "caf\u00e9 noir\0".encode("latin1"),
        b"\x7fELF\x02\x01\x01\0\0\0\xff\xfe" * 9,
        bytes(HEAD + 100),
    ],
)
def test_a_file_with_zeros_is_not_taken_for_utf16(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError) as error:
        read_text(path)
    head = content[:HEAD]
    count = f"{head.count(0):,} NUL characters in its first {len(head):,} bytes"
    assert f"{path} must be text in UTF-8, got a file that holds {count}: it is damaged, not text, or" in str(
        error.value
    )
    assert str(error.value).endswith(f"for example: tr -d '\\000' < {path} > notes-text.txt")


def test_a_few_zeros_are_characters_of_a_text(tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(b"one name\0another\0the last name\0\n")
    assert read_text(path) == "one name\0another\0the last name\0\n"


def test_marks_and_line_ends_are_normalised(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_text(path) == "one\ntwo\nthree\n"


def test_three_files_stay_as_they_are(tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / name).write_text(f"{name}\n")
    corpus = corpus_from_files(*(tmp_path / name for name in ("train", "valid", "test")))
    assert (corpus.train, corpus.valid, corpus.test) == ("train\n", "valid\n", "test\n")


def test_one_file_is_divided_at_ends_of_lines_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {number}\n" for number in range(200))
    (tmp_path / "text").write_text(text)
    corpus = corpus_from_file(tmp_path / "text", (0.8, 0.1, 0.1))
    assert corpus.train + corpus.valid + corpus.test == text
    assert all(part.endswith("\n") for part in (corpus.train, corpus.valid, corpus.test))
    assert abs(len(corpus.train) / len(text) - 0.8) < 0.01
    assert abs(len(corpus.valid) / len(text) - 0.1) < 0.01


@pytest.mark.parametrize("shares", [(0.9, 0.1), (0.9, 0.2, 0.1), (1.0, 0.1, -0.1)])
def test_shares_must_sum_to_one(shares):
    with pytest.raises(ArgumentError, match="`shares` must be three positive numbers that sum to 1"):
        divide("text", "a\nb\nc\n", shares)


def test_a_text_with_too_few_lines_is_refused():
    with pytest.raises(CorpusError, match="too few lines"):
        divide("one line", "only one line", (0.9, 0.05, 0.05))


def test_the_topics_of_python_have_no_paragraph_twice():
    corpus = python_topics()
    paragraphs = [" ".join(each.split()) for each in (corpus.train + corpus.valid + corpus.test).split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert len(corpus.train) > 250_000, sys.version
    assert len(corpus.valid) > 10_000
    assert len(corpus.test) > 10_000

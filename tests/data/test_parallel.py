"""Parallel files, their splitting, and generated pairs, which need no files."""

from __future__ import annotations

import itertools

import pytest

from gatewise.contract.errors import ArgumentError, CorpusError, MissingExtra
from gatewise.data import ParallelText, divide_parallel, phrases, read_parallel


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_line_n_of_one_file_goes_with_line_n_of_the_other(write):
    # U+2028 and a form feed end lines for str.splitlines, but not in a file.
    pairs = read_parallel(write("a.de", "eins  zwei\n\ndr\u2028ei\f\n"), write("a.en", "one two\r\n\r\nthree"))
    assert pairs.source == ("eins zwei", "", "dr ei")
    assert pairs.target == ("one two", "", "three")


def test_files_of_unequal_length_are_refused_with_both_counts(write):
    with pytest.raises(CorpusError, match=r"a.de has 3 lines and .*a.en has 2"):
        read_parallel(write("a.de", "1\n2\n3\n"), write("a.en", "1\n2\n"))
    with pytest.raises(CorpusError, match="2 sentences and 1 translations"):
        ParallelText("x", ("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "a.en is empty"), (b" \n\n", "a.en is empty"), (b"ok\n\xfcber\n", "byte 3 is 0xfc")]
)
def test_files_without_text_are_refused(write, content, message):
    with pytest.raises(CorpusError, match=message):
        read_parallel(write("a.de", "1\n2\n"), write("a.en", content))


def test_no_sentence_stands_in_two_parts():
    pairs = ParallelText("x", tuple(f"s{number % 40}" for number in range(100)), tuple(map(str, range(100))))
    parts = divide_parallel(pairs, (0.5, 0.25, 0.25), seed=1)
    sentences = [set(part.source) for part in parts]
    assert sum(map(len, sentences)) == 40
    assert sorted(int(row) for part in parts for row in part.target) == list(range(100))
    assert all(
        int(target) % 40 == int(source[1:])
        for part in parts
        for source, target in zip(part.source, part.target, strict=True)
    )
    assert divide_parallel(pairs, (0.5, 0.25, 0.25), seed=2)[0] != parts[0]


def test_divisions_that_leave_a_part_empty_are_refused():
    pairs = ParallelText("x", ("a", "b", "a"), ("1", "2", "3"))
    with pytest.raises(CorpusError, match="2 different sentences"):
        divide_parallel(pairs)
    with pytest.raises(ArgumentError, match="shares"):
        divide_parallel(pairs, (0.5, 0.5, 0.5))


class TestPhrases:
    @pytest.fixture(autouse=True)
    def babel(self):
        pytest.importorskip("babel")

    def test_a_phrase_has_one_translation(self):
        pairs = phrases(count=3000)
        assert len(set(pairs.source)) == len(pairs) == 3000
        known = dict(zip(pairs.source, pairs.target, strict=True))
        assert any("Dezember" in phrase and "December" in known[phrase] for phrase in known)
        assert any(phrase.startswith("vor ") and known[phrase].endswith(" ago") for phrase in known)

    def test_the_seed_decides(self):
        assert phrases(count=50) == phrases(count=50)
        assert phrases(count=50) != phrases(count=50, seed=1)

    def test_dates_are_written_as_iso_8601(self):
        pairs = phrases("en", "iso", count=200)
        dates = dict(zip(pairs.source, pairs.target, strict=True))
        assert all(date[4] == date[7] == "-" for date in dates.values())
        for phrase, date in dates.items():
            if phrase.startswith("March"):
                assert "-03-" in date

    @pytest.mark.parametrize(("source", "target"), [("xx", "en"), ("de", ""), ("iso", "de"), ("de", "../de")])
    def test_unknown_languages_are_refused(self, source, target):
        with pytest.raises(ArgumentError, match="must be a locale"):
            phrases(source, target, 10)

    def test_more_phrases_than_there_are_cannot_be_had(self, monkeypatch):
        # Two German phrases with the same meaning, and one with two meanings.
        things = itertools.cycle(
            [lambda language: "eins", lambda language: "zwei", lambda language: "zwei " + language]
        )
        monkeypatch.setattr("gatewise.data.phrase_examples._things", lambda *_: things)
        assert set(phrases(count=2).source) == {"eins", "zwei"}
        with pytest.raises(CorpusError, match="different phrases, about 3, got 4"):
            phrases(count=4)
        with pytest.raises(ArgumentError, match="count"):
            phrases(count=0)

    def test_a_phrase_with_two_meanings_is_left_out(self, monkeypatch):
        meanings = itertools.count()
        unclear = lambda language: "unklar" if language == "de" else str(next(meanings))  # noqa: E731
        things = itertools.cycle([unclear, unclear, _one])
        monkeypatch.setattr("gatewise.data.phrase_examples._things", lambda *_: things)
        with pytest.raises(CorpusError, match="about 1, got 2"):
            phrases(count=2)

    def test_without_babel_the_command_is_named(self, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "babel", None)
        with pytest.raises(MissingExtra, match=r"gatewise\[train\]"):
            phrases(count=1)


def _one(language):
    return "eins"

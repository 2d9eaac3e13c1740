"""BLEU, chrF and exact matches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gatewise.cli.nmt_scores import TranslationScorer
from gatewise.contract.errors import MissingExtra


@pytest.fixture(autouse=True)
def library():
    return pytest.importorskip("sacrebleu")


def test_scores_are_those_of_sacrebleu(library):
    answers, wanted = ["the cat sat on the mat", "a dog, perhaps", "x"], ["the cat sat on a mat", "a dog, perhaps", "y"]
    scorer = TranslationScorer(wanted, "en")
    scorer(["y", "x", "a"])  # the scores of one set of translations do not depend on those before
    scores = scorer(answers)
    assert scores.bleu == pytest.approx(library.corpus_bleu(answers, [wanted]).score)
    assert scores.chrf == pytest.approx(library.corpus_chrf(answers, [wanted]).score)
    assert 0 < scores.bleu < 100
    assert scores.exact == 1 / 3
    assert scores.figures() == {"BLEU": scores.bleu, "chrF": scores.chrf, "exact": scores.exact}
    assert f"version:{library.__version__}" in scores.bleu_signature
    assert "nc:6" in scores.chrf_signature


@pytest.mark.parametrize(
    ("language", "tokens"),
    [("en", "13a"), ("pt_BR", "13a"), ("iso", "13a"), ("zh", "zh"), ("zh-Hans", "zh"), ("ja", "char"), ("ko", "char")],
)
def test_languages_without_spaces_are_divided_in_their_own_way(language, tokens):
    scores = TranslationScorer(["二〇二四年三月六日"], language)(["二〇二四年三月五日"])
    assert f"|tok:{tokens}|" in scores.bleu_signature


def test_translations_that_are_all_empty_are_scored():
    assert TranslationScorer(["a", "b"], "en")(["", ""]).bleu == 0


def test_without_sacrebleu_training_does_not_begin(gatewise, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(MissingExtra, match=r"sacrebleu.*gatewise\[train\]"):
        TranslationScorer(["a"], "en")
    answer = gatewise("train", "nmt", "--output", "run")
    assert answer.status == 1
    expected = "scoring translations needs `sacrebleu`, which is not installed. Run: pip install 'gatewise[train]'"
    assert answer.err.strip() == f"error: {expected}"
    assert not Path("run").exists()

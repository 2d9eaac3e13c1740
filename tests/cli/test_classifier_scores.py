"""Scores of a classifier are those of scikit-learn, also if a class never occurs or there is only one number."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

from gatewise.cli import classifier_scores
from gatewise.cli.classifier_scores import scores_of
from gatewise.contract.errors import MissingExtra, NotFinite


@pytest.fixture(autouse=True, scope="module")
def needs_sklearn():
    pytest.importorskip("sklearn")  # here, because the import takes two seconds in every process that collects tests


def probabilities(taken, classes):
    return np.eye(classes)[taken]


def test_the_scores_of_classes_are_by_class_and_their_plain_mean():
    targets, taken = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 2])
    scores = scores_of(probabilities(taken, 4), targets, ["a", "b", "c", "d"])
    assert scores["accuracy"] == pytest.approx(3 / 5)
    assert scores["confusion"] == [[2, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert scores["classes"]["a"] == {
        "precision": 1.0,
        "recall": pytest.approx(2 / 3),
        "f1": pytest.approx(4 / 5),
        "sequences": 3,
    }
    # c is predicted but never true, d is neither: 0 divided by 0 counts as 0, in the means too.
    for name in ("c", "d"):
        assert scores["classes"][name] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "sequences": 0}
    assert scores["macro_precision"] == pytest.approx((1 + 1 / 2) / 4)
    assert scores["macro_recall"] == pytest.approx((2 / 3 + 1 / 2) / 4)
    assert scores["macro_f1"] == pytest.approx((4 / 5 + 1 / 2) / 4)


def test_sequences_are_counted_in_whole_numbers_also_if_no_prediction_is_right():
    scores = scores_of(probabilities([1, 0], 2), np.array([0, 1]), ["a", "b"])
    assert [repr(each["sequences"]) for each in scores["classes"].values()] == ["1", "1"]


def test_many_classes_have_no_matrix_and_are_plotted_in_groups(monkeypatch, tmp_path):
    plotted = []
    monkeypatch.setattr(classifier_scores, "plot_confusion", lambda *given: plotted.append(given))
    names, targets = [f"c{number}" for number in range(1001)], np.array([0, 1, 2, 1000])
    answers = probabilities([1, 1, 0, 1000], 1001)
    scores = scores_of(answers, targets, names)
    assert scores["accuracy"] == 0.5
    assert "confusion" not in scores
    classifier_scores.plot_predictions(tmp_path / "confusion.png", answers, targets, names)
    ((_, counts, groups, together),) = plotted
    assert together == 2
    assert groups == names[::2]
    assert {place: counts[place] for place in zip(*counts.nonzero(), strict=True)} == {
        (0, 0): 2,
        (1, 0): 1,
        (500, 500): 1,
    }


def test_names_of_classes_may_be_those_of_scores():
    scores = scores_of(probabilities([0, 1], 2), np.array([0, 0]), ["accuracy", "macro avg"])
    assert scores["accuracy"] == 0.5
    assert scores["classes"]["accuracy"]["recall"] == 0.5


def test_the_scores_of_numbers():
    scores = scores_of(np.array([1.5, 2.0, 5.0]), np.array([1.0, 2.0, 6.0]), ())
    assert scores == pytest.approx({"mse": 1.25 / 3, "mae": 0.5, "r2": 1 - 1.25 / 14})


@pytest.mark.parametrize("count", [1, 5])
def test_r2_of_targets_that_are_all_the_same_says_whether_they_are_met(count):
    targets = np.ones(count)
    with warnings.catch_warnings(action="error"):
        assert scores_of(targets, targets, ())["r2"] == 1.0
        assert scores_of(targets + 1, targets, ())["r2"] == 0.0


@pytest.mark.parametrize("classes", [(), ("a", "b")])
def test_answers_that_are_no_numbers_are_refused(classes):
    answers = np.full((3, 2) if classes else 3, np.nan)
    with pytest.raises(NotFinite, match="the model's predictions must be finite to be scored, got nan"):
        scores_of(answers, np.zeros(3, np.int64), classes)


def test_without_scikit_learn_training_does_not_begin(gatewise, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtra, match="pip install 'gatewise"):
        scores_of(np.ones(3), np.ones(3), ())
    answer = gatewise("train", "classify", "--data", "synthetic", "--output", "run")
    assert answer.status == 1
    expected = "scoring a classifier needs `scikit-learn`, which is not installed. Run: pip install 'gatewise[train]'"
    assert answer.err.strip() == f"error: {expected}"
    assert not list((tmp_path / "run").glob("*.safetensors"))

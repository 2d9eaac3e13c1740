"""Records of the quality of trained models: a recipe is told apart by its task and its name."""

from __future__ import annotations

import dataclasses

import pytest

from gatewise.benchmarks.quality import QualityRecord, markdown, newest
from gatewise.benchmarks.record import Record


@pytest.fixture
def language(row: Record) -> QualityRecord:
    figures = {"valid_perplexity": 70.0, "test_perplexity": 65.0}
    return QualityRecord("quality", "lm", "small", 1, {"window": 35}, 2.0, figures, [], row.run)


@pytest.fixture
def translation(language: QualityRecord) -> QualityRecord:
    figures = {"valid_bleu": 30.0, "test_bleu": 25.0}
    return dataclasses.replace(language, task="nmt", settings={"beam": 4}, figures=figures)


def test_recipes_of_one_name_in_two_tasks_are_both_shown(language: QualityRecord, translation: QualityRecord) -> None:
    assert newest([language, translation]) == newest([translation, language]) == [language, translation]
    lines = markdown([language, translation]).splitlines()
    assert f"| `small` | {language.run.device} | perplexity | 70.0 | 65.0 | 2.00 | 1 |" in lines
    assert f"| `small` | {language.run.device} | BLEU | 30.0 | 25.0 | 2.00 | 1 |" in lines
    assert lines[-1].endswith("; commit 0123456789.")


def test_records_of_a_changed_recipe_do_not_count(language: QualityRecord, translation: QualityRecord) -> None:
    older = dataclasses.replace(language, seed=2)
    changed = dataclasses.replace(language, settings={"window": 70})
    assert newest([older, translation, changed]) == [changed, translation]


def test_an_option_that_is_newer_than_a_record_had_its_default(language: QualityRecord) -> None:
    older = dataclasses.replace(language, settings={"threads": 0, "training": {"epochs": 2}})
    defaults = {"lm": {"threads": 1, "budget": "auto", "training": {"epochs": 9, "clip": 0.0}}}

    def later(**training: float) -> QualityRecord:
        settings = {"threads": 0, "budget": "auto", "training": {"epochs": 2, **training}}
        return dataclasses.replace(language, seed=2, settings=settings)

    unchanged, changed = later(clip=0.0), later(clip=1.0)
    assert newest([older, unchanged], defaults=defaults) == [older, unchanged]
    assert newest([older, changed], defaults=defaults) == [changed]


def test_runs_on_two_devices_have_rows_of_their_own(language: QualityRecord) -> None:
    other = dataclasses.replace(language, minutes=3.0, run=dataclasses.replace(language.run, device="other device"))
    assert newest([language, other]) == newest([other, language])
    assert newest([language, other], "other") == [other]
    shown = markdown(newest([language, other]))
    assert f"| `small` | {language.run.device} | perplexity | 70.0 | 65.0 | 2.00 | 1 |" in shown
    assert "| `small` | other device | perplexity | 70.0 | 65.0 | 3.00 | 1 |" in shown
    assert language.run.device in shown.splitlines()[-1]
    assert "other device" in shown.splitlines()[-1]

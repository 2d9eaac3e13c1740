"""The page on benchmarks states the commits of the records in the layers' tables."""

from __future__ import annotations

import collections
from pathlib import Path

from gatewise.benchmarks import record
from gatewise.benchmarks.lstm.record import TRAIN, LayerRecord, newest

ROOT = Path(__file__).parents[2]
HALVES = {"c06559b", "d535a43b3c"}  # the commits of the records with float16 products after the loop


def records(name):
    rows = newest(record.read_lines(record.path_of(ROOT / record.RESULTS, name), LayerRecord))
    return [row for row in rows if row.kernel == "auto"]


def page():
    return " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())


def of_halves(rows):
    return {(row.dtype, row.direction) for row in rows if row.run.commit[:10] in HALVES}


def test_the_page_names_the_commit_of_every_cell():
    rows = records("lstm")
    assert {row.dtype for row in rows} == {"bf16", "tf32", "fp16", "fp32"}
    ((commit, _),) = collections.Counter(
        row.run.commit[:10] for row in rows if row.run.commit[:10] not in HALVES
    ).items()
    assert of_halves(rows) == {("tf32", TRAIN)}
    assert all(row.run.commit[:10] in HALVES for row in rows if (row.dtype, row.direction) == ("tf32", TRAIN))
    first, second = sorted(HALVES)
    expected = f"all of them are of commit {commit}, except training in TF32, "
    assert expected in page()
    assert f"(commits {first} and {second})" in page()


def test_the_page_states_which_records_of_grus_are_newer():
    rows = records("gru")
    assert of_halves(rows) == {("tf32", TRAIN)}
    assert all(row.run.commit[:10] in HALVES for row in rows if (row.dtype, row.direction) == ("tf32", TRAIN))
    first, second = sorted(HALVES)
    assert f"Training in TF32 is of commits {first} and {second}, with float16 products" in page()

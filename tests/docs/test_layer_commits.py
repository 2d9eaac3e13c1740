"""The page on benchmarks states the commits of the records in the layers' tables, and what newer records changed."""

from __future__ import annotations

import collections
from pathlib import Path

from gatewise.benchmarks import record
from gatewise.benchmarks.lstm.record import EAGER, GRAPH, OURS, TRAIN, LayerRecord, newest
from gatewise.benchmarks.record import MEASURED

ROOT = Path(__file__).parents[2]
HALVES = "8c6cbf6b13"  # the commit of the first records with float16 products after the loop


def records(name):
    return record.read_lines(record.path_of(ROOT / record.RESULTS, name), LayerRecord)


def page():
    return " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())


def spoken(names):
    return f"{', '.join(names[:-1])} and {names[-1]}"


def test_the_page_names_the_commit_of_every_cell():
    rows = [row for row in newest(records("lstm")) if row.kernel == "auto"]
    assert {row.dtype for row in rows} == {"bf16", "tf32", "fp16", "fp32"}
    (commit, _), *others = collections.Counter(row.run.commit[:10] for row in rows).most_common()
    assert [other for other, _ in others] == [HALVES]
    newer = [row for row in rows if row.run.commit[:10] == HALVES]
    assert {(row.dtype, row.direction) for row in newer} == {("tf32", TRAIN)}
    expected = (
        f"all of them are of commit {commit}, except training in TF32 of {spoken([row.case for row in newer])}, "
        f"which is of commit {HALVES}."
    )
    assert expected in page()


def test_the_page_states_which_records_of_grus_are_newer_and_how_they_differ():
    rows = [
        row
        for row in records("gru")
        if (row.dtype, row.direction, row.kernel, row.status) == ("tf32", TRAIN, "auto", MEASURED)
    ]
    of_case = collections.defaultdict(list)
    for row in rows:
        of_case[row.case].append(row)
    pairs = {case: found[-2:] for case, found in of_case.items() if found[-1].run.commit.startswith(HALVES)}

    def ratios(how, side):
        return {
            case: f"{after.median(how, side) / before.median(how, side):.2f}" for case, (before, after) in pairs.items()
        }

    def ends(found):
        return f"{min(found)} to {max(found)}"

    ours = ratios(GRAPH, OURS)
    shorter = [f"{ratio} ({case})" for case, ratio in ours.items() if float(ratio) < 0.95]
    others = [ratio for ratio in ours.values() if float(ratio) >= 0.95]
    text = page()
    assert f"In TF32, training of {spoken(list(pairs))} is of commit {HALVES}" in text
    assert f"the other {len(of_case) - len(pairs)} shapes are of earlier commits" in text
    assert (
        f"{spoken(shorter)} of the former time in a CUDA graph, and {ends(others)} in the other {len(others)}" in text
    )
    eager, graph = (ends(ratios(how, "nn.GRU").values()) for how in (EAGER, GRAPH))
    assert f"`torch.nn.GRU` took {eager} of its former time from Python, and {graph} in a CUDA graph" in text

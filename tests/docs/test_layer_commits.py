"""The page on benchmarks states the commits of the records in the layer's table."""

from __future__ import annotations

from pathlib import Path

from gatewise.benchmarks import record
from gatewise.benchmarks.lstm.record import LayerRecord, newest

ROOT = Path(__file__).parents[2]


def test_the_page_names_the_commit_of_every_cell():
    lines = record.read_lines(record.path_of(ROOT / record.RESULTS, "lstm"), LayerRecord)
    rows = [row for row in newest(lines) if row.kernel == "auto"]
    assert {row.dtype for row in rows} == {"bf16", "tf32", "fp16", "fp32"}
    (commit,) = {row.run.commit[:10] for row in rows}
    page = " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())
    assert f"all of them are of commit {commit}." in page

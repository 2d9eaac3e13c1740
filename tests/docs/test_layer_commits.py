"""The page on benchmarks says which commits the cells of the layer's table are of."""

from __future__ import annotations

from pathlib import Path

from gatewise.benchmarks import record
from gatewise.benchmarks.lstm.record import LayerRecord, newest

ROOT = Path(__file__).parents[2]


def test_the_page_names_the_cells_of_each_commit():
    lines = record.read_lines(record.path_of(ROOT / record.RESULTS, "lstm"), LayerRecord)
    rows = [row for row in newest(lines) if row.kernel == "auto"]
    early, late = sorted({row.run.commit[:10] for row in rows}, key=[row.run.commit[:10] for row in lines].index)
    again = {
        dtype: {row.case for row in rows if row.dtype == dtype and row.run.commit.startswith(late)}
        for dtype in ("bf16", "tf32", "fp16", "fp32")
    }
    every = {row.case for row in rows}
    decoding = {case for case in every if case.startswith("decode")}
    assert again["bf16"] == again["tf32"] == every
    assert again["fp16"] == {"100-16-1024"} | decoding
    assert len(decoding) == 4
    assert again["fp32"] == {"nmt_encoder", "50-256-512", "50-256-1024", "50-512-1024"}
    page = " ".join((ROOT / "docs/benchmarks.md").read_text("utf-8").split())
    assert (
        f"All of bfloat16 and TF32 is of commit {late}, and so are, in float16, 100-16-1024 and the four single steps "
        "of decoding, and in exact float32 nmt_encoder, 50-256-512, 50-256-1024 and 50-512-1024; the others are of "
        f"{early}." in page
    )

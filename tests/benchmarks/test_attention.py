"""`gatewise bench attention`: checks before times, a record for each way, and a table of them."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from gatewise.benchmarks import attention, attention_report
from gatewise.benchmarks.publication import publication
from gatewise.benchmarks.record import MEASURED, REFUSED, WRONG, append_line, read_lines
from gatewise.cli.bench import app


@pytest.fixture
def few(monkeypatch):
    chosen = {name: way for name, way in attention.ways().items() if name != "fused"}
    monkeypatch.setattr(attention, "ways", lambda: chosen)
    return chosen


def test_every_way_is_measured_and_read_back(few, tmp_path):
    rows = list(attention.run(torch.device("cpu"), (torch.float32,), quick=True, budget=0.0))
    assert [row.way for row in rows] == list(few) * len(attention.QUICK_SIZES)
    assert all(row.status == MEASURED and row.median > 0 and row.error <= row.allowed for row in rows)
    for row in rows:
        append_line(dataclasses.asdict(row), tmp_path / "attention.jsonl")
    assert read_lines(tmp_path / "attention.jsonl", attention.AttentionRecord) == rows


@pytest.mark.parametrize("stopped", [False, True])
def test_a_trial_can_be_reported_and_an_interrupted_one_keeps_its_rows(few, tmp_path, monkeypatch, stopped):
    every = attention.run

    def run(*args, **kwargs):
        yield next(rows := every(*args, **kwargs))
        if stopped:
            raise KeyboardInterrupt
        yield from rows

    monkeypatch.setattr(attention, "run", run)
    words = ["attention", "--quick", "--device", "cpu", "--seconds", "0", "--results", str(tmp_path)]
    assert CliRunner().invoke(app, words).exit_code == (130 if stopped else 0)
    shown = publication(attention.QUICK_BENCHMARK, tmp_path)
    rows = read_lines(tmp_path / "attention_quick.jsonl", attention.AttentionRecord)
    assert len(rows) == (1 if stopped else len(few) * len(attention.QUICK_SIZES))
    assert {row.benchmark for row in rows} == {attention.QUICK_BENCHMARK}
    assert shown.report.count("float32") == len(rows)


def test_a_wrong_way_gets_no_time(few, monkeypatch):
    monkeypatch.setitem(few, "reference", lambda inputs: attention.plain(inputs._replace(lengths=None)))
    rows = list(attention.run(torch.device("cpu"), (torch.float32,), quick=True, budget=0.0))
    assert {row.way for row in rows if row.status == WRONG} == {"reference"}
    assert all(row.median is None for row in rows if row.way == "reference")
    assert "| reference | wrong |" in attention_report.markdown(rows)


def test_a_kernel_that_refuses_is_a_row_that_says_why(monkeypatch):
    monkeypatch.setattr(attention, "QUICK_SIZES", ((2, 3),))
    rows = list(attention.run(torch.device("cpu"), (torch.float64,), quick=True, budget=0.0))
    fused = next(row for row in rows if row.way == "fused")
    assert fused.status == REFUSED
    assert "dtype is float64" in fused.note


def test_table_compares_with_plain_torch():
    row = attention.AttentionRecord(
        **json.loads(
            '{"benchmark": "attention", "steps": 9, "source": 9, "batch": 2, "hidden": 4, "dtype": "float32"}'
        ),
        way=attention.PLAIN,
        status=MEASURED,
        note="",
        run=attention.Run("2026-01-01", "", "gpu", "", "", "2.11", "", 0, "0.1", "abcdefghij", False),
        median=1.0,
        replayed=0.8,
        peak_bytes=4000,
    )
    other = dataclasses.replace(row, way="fused", median=0.5, replayed=0.2, peak_bytes=100)
    table = attention_report.markdown([row, other])
    assert "| float32 | 9 | 9 | fused | 500 ms | 200 ms | 100 B | 4.0x as fast, 40.0x less memory |" in table

"""The benchmark of the saved state: rows contain measurements, and the page shows the newest rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

from gatewise.benchmarks import systemml as benchmark
from gatewise.benchmarks.record import RESULTS, Run, read_lines
from gatewise.contract.errors import KernelRefused

ROOT = Path(__file__).parents[2]
SMALL = (3, 4, 5, 2)


@pytest.fixture
def run_here():
    return Run.now(torch.device("cpu"))


def measured(run, kernel="eager", dtype=torch.float64):
    return benchmark.measure(SMALL, dtype, kernel, run, "cpu", 3)


def test_a_row_is_recorded_whole(run_here, tmp_path):
    row = measured(run_here)
    assert 0 <= row.error <= 1e-12
    assert min(timing.median for timing in (row.forward, row.with_state, row.without_state)) > 0
    path = tmp_path / "systemml.jsonl"
    benchmark.append_line(benchmark.dataclasses.asdict(row), path)
    assert read_lines(path, benchmark.StateRecord) == [row]
    assert benchmark.summary(tmp_path) == benchmark.markdown([row])
    assert "| 3, 4, 5, 2 | float64 | eager |" in benchmark.markdown([row])


def test_a_wrong_gradient_is_not_timed(run_here, monkeypatch):
    backward = benchmark.systemml.lstm_backward

    def wrong(*arguments, **options):
        dX, *others = backward(*arguments, **options)
        return (dX * 1.01 if arguments[8] is not None else dX, *others)

    monkeypatch.setattr(benchmark.systemml, "lstm_backward", wrong)
    monkeypatch.setattr(benchmark, "time_side_by_side", lambda *_, **__: pytest.fail("timed although wrong"))
    with pytest.raises(ArithmeticError, match=r"gradients differ by 1\.0e-02"):
        measured(run_here)


def test_a_kernel_that_refuses_is_named(run_here):
    with pytest.raises(KernelRefused):
        measured(run_here, kernel="cudnn")


def test_the_command_measures_and_fills_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(benchmark.CASES, "cpu", [SMALL])
    assert benchmark.main(["--results", str(tmp_path), "--runs", "3"]) == 0
    assert "3, 4, 5, 2 | float32 | aten" in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark: systemml -->\n<!-- /benchmark: systemml -->\nafter\n")
    assert benchmark.main(["--results", str(tmp_path), "--into", str(page)]) == 0
    assert benchmark.summary(tmp_path) in page.read_text()
    assert len(read_lines(tmp_path / "systemml.jsonl", benchmark.StateRecord)) == 4


def test_the_page_shows_the_newest_records():
    page = (ROOT / "docs" / "how-to" / "come-from-systemml.md").read_text("utf-8")
    (shown,) = re.findall(r"<!-- benchmark: systemml -->\n(.*?)\n<!-- /benchmark: systemml -->", page, re.DOTALL)
    recorded = (ROOT / RESULTS / "systemml.jsonl").exists()
    expected = benchmark.summary(ROOT / RESULTS) if recorded else "No record yet."
    assert shown == expected, "run: python -m gatewise.benchmarks.systemml --into docs/how-to/come-from-systemml.md"

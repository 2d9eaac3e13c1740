"""Records are read from files unchanged, and state their origin."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
import torch

import gatewise
from gatewise.benchmarks import record
from gatewise.benchmarks.record import Record, Run
from gatewise.contract.errors import ArgumentError


def test_round_trip_and_append_only(row: Record, tmp_path: Path) -> None:
    other = dataclasses.replace(row, way="nn.LSTM", status="wrong", median=None, q20=None, q80=None)
    path = record.append([row], tmp_path / "new")
    first = path.read_text()
    record.append([other], tmp_path / "new")
    assert path == tmp_path / "new" / "lm.jsonl"
    assert path.read_text().startswith(first)
    assert record.read(path) == [row, other]


def test_nothing_to_append(tmp_path: Path) -> None:
    assert record.append([], tmp_path / "new") is None
    assert not (tmp_path / "new").exists()


def test_newest_run_of_a_device(row: Record) -> None:
    def on(device: str, date: str, way: str) -> Record:
        return dataclasses.replace(row, way=way, run=dataclasses.replace(row.run, device=device, date=date))

    rows = [on("NVIDIA H200", "1", "a"), on("NVIDIA H200", "2", "b"), on("NVIDIA H200", "2", "c"), on("CPU", "3", "d")]
    assert [found.way for found in record.newest(rows)] == ["d"]
    assert [found.way for found in record.newest(rows, "h200")] == ["b", "c"]
    with pytest.raises(ArgumentError, match=r"recorded device's name: NVIDIA H200, CPU, got 'a100'"):
        record.newest(rows, "a100")


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="Run `gatewise bench lm` first"):
        record.read(tmp_path / "lm.jsonl")


@pytest.mark.parametrize("line", ["{", "{}", '{"run": {}}', "[]"])
def test_a_broken_line_is_named(row: Record, tmp_path: Path, line: str) -> None:
    path = record.append([row], tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ArgumentError, match="got line 2 of"):
        record.read(path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="`--results` must be a folder that can be made"):
        record.check_writable(tmp_path / "file" / "folder")


def test_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/gatewise", "bench", "lm", "--train", "a b"])
    run = Run.now(torch.device("cpu"))
    assert run.command == "gatewise bench lm --train 'a b'"
    assert (run.torch, run.gatewise, run.driver) == (torch.__version__, gatewise.__version__, "")
    assert f"{torch.get_num_threads()} threads" in run.device


def _git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True).stdout


def test_the_commit_is_the_package_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracked package has its commit, and is dirty if its files changed; one inside another checkout has no
    commit."""
    package = tmp_path / "package"
    (package / "benchmarks").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(record, "__file__", str(package / "benchmarks" / "record.py"))
    monkeypatch.delenv("GATEWISE_COMMIT", raising=False)
    _git(tmp_path, "init", "-q")
    assert record._checkout() == ("", False)
    monkeypatch.setenv("GATEWISE_COMMIT", "told")
    assert record._checkout() == ("told", False)
    monkeypatch.delenv("GATEWISE_COMMIT")
    _git(tmp_path, "add", "package")
    _git(tmp_path, "commit", "-q", "-m", "Add")
    commit = _git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "results.jsonl").write_text("{}")
    assert record._checkout() == (commit, False)
    (package / "__init__.py").write_text("1")
    assert record._checkout() == (commit, True)

"""The folder of a run: its own files are known, others are never touched, and only one process writes at a time."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal

import pytest

from gatewise.contract.errors import ArgumentError, CheckpointError
from gatewise.data import load_tokenizer
from gatewise.training import RunFolder, run_lock

FLOCK = pytest.mark.skipif(run_lock.fcntl is None, reason="needs flock")


def begun(path, model=b"old"):
    """A folder with a run, and a file that is not the run's."""
    folder = RunFolder(path)
    folder.prepare(0)
    folder.manifest.claim([folder.recipe, folder.tensorboard / "events.1"])
    folder.tensorboard.mkdir()
    for file in folder.manifest.files():
        file.write_bytes(model)
    (path / "notes.txt").write_text("mine")
    (folder.tensorboard / "events.of.another").write_text("theirs")
    return folder


def content(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


FOREIGN = {"notes.txt", "tensorboard/events.of.another"}


def test_files_of_other_origin_are_named_and_nothing_is_claimed(tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    (tmp_path / "checkpoint.safetensors").symlink_to("absent")
    with pytest.raises(ArgumentError, match=r"did not write: checkpoint\.safetensors, model\.safetensors\. Choose"):
        RunFolder(tmp_path).prepare(0)
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert not RunFolder(tmp_path).manifest.path.exists()


def test_a_report_of_a_fault_that_somebody_else_wrote_is_kept(tmp_path):
    (tmp_path / "fault.safetensors").write_text("mine")
    with pytest.raises(ArgumentError, match=r"gatewise did not write: fault\.safetensors\. Choose"):
        RunFolder(tmp_path).prepare(0)


def test_a_run_may_replace_what_it_claimed(tmp_path):
    folder = begun(tmp_path)
    RunFolder(tmp_path).prepare(0)
    assert folder.manifest.foreign([folder.model, folder.recipe]) == []
    assert folder.manifest.foreign([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"files": 1}',
        '{"files": ["../model.safetensors"]}',
        '{"files": ["/etc/passwd"]}',
        '{"files": ["a", 2]}',
        '{"files": ["a\\u0000"]}',
        '{"files": ["\\ud800"]}',
        '{"name": "a file of somebody else"}',
    ],
)
def test_a_list_that_is_damaged_or_reaches_further_is_refused_and_kept(tmp_path, text):
    folder = RunFolder(tmp_path)
    folder.manifest.path.write_text(text)
    with pytest.raises(CheckpointError, match=r"gatewise-run\.json is damaged, or was not written by gatewise"):
        folder.prepare(0)
    assert folder.manifest.path.read_text() == text


def test_a_replaced_run_disappears_when_the_new_one_begins_and_nothing_else_does(tmp_path):
    folder = begun(tmp_path)
    with folder.replaced():
        assert not folder.exists()
        assert set(content(tmp_path)) >= FOREIGN
        folder.prepare(0)
        folder.checkpoint.write_bytes(b"new")
        folder.begun()
        assert content(tmp_path).keys() == FOREIGN | {"gatewise-run.json", "checkpoint.safetensors"}
    assert folder.checkpoint.read_bytes() == b"new"
    assert content(tmp_path).keys() == FOREIGN | {"gatewise-run.json", "checkpoint.safetensors"}


def test_a_run_that_fails_before_it_begins_leaves_the_old_one(tmp_path):
    folder = begun(tmp_path)
    before = content(tmp_path)

    def fail():
        with folder.replaced():
            folder.prepare(0)
            folder.recipe.write_bytes(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert content(tmp_path) == before


@pytest.mark.parametrize("step", range(12))
def test_whenever_the_process_is_killed_the_old_run_can_be_put_back(tmp_path, step, monkeypatch):
    """A process may be killed after any move of a file, including those that restore the earlier run."""
    folder = begun(tmp_path)
    before = content(tmp_path)
    moves = iter(range(100))
    original = type(tmp_path).replace

    def replace(self, target):
        if next(moves) == step:
            raise SystemExit("killed")
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "replace", replace)
        patch.setattr(RunFolder, "recover", lambda self: None)
        with contextlib.suppress(SystemExit), folder.replaced():
            folder.prepare(0)
            folder.checkpoint.write_bytes(b"new")
            raise SystemExit("killed before the new run has begun")
    with monkeypatch.context() as patch:
        moves = iter(range(100))
        patch.setattr(type(tmp_path), "replace", replace)
        with contextlib.suppress(SystemExit):
            RunFolder(tmp_path).recover()
    RunFolder(tmp_path).recover()
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", [".gatewise-replaced", ".gatewise-discarded"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_has_the_name_of_a_folder_for_the_earlier_run_is_kept(tmp_path, name, is_folder):
    folder, foreign = begun(tmp_path), tmp_path / name
    if is_folder:
        foreign.mkdir()
    (foreign / "notes.txt" if is_folder else foreign).write_text("mine")
    before = content(tmp_path)
    folder.recover()
    with (
        pytest.raises(ArgumentError, match=rf"`output` must be a folder without {name}, .*Move it away"),
        folder.replaced(),
    ):
        pass
    assert content(tmp_path) == before
    empty = RunFolder(tmp_path / "empty")
    empty.path.mkdir()
    foreign.rename(empty.path / name)
    before = content(empty.path)
    with empty.replaced():  # there is no earlier run
        pass
    assert content(empty.path) == before


@FLOCK
@pytest.mark.parametrize("linked", [True, False])
def test_a_file_with_the_name_of_the_lock_is_kept(tmp_path, linked):
    name, notes = tmp_path / ".gatewise-run.lock", tmp_path / "notes.txt"
    notes.write_text("mine")
    name.symlink_to(notes) if linked else name.write_text("mine")
    with pytest.raises(ArgumentError, match=r"file \.gatewise-run\.lock that gatewise did not write"):
        RunFolder(tmp_path).try_lock()
    assert name.is_symlink() == linked
    assert name.read_text() == notes.read_text() == "mine"


@FLOCK
def test_a_second_process_is_told_who_holds_the_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        (tmp_path / "run" / "notes.txt").write_text("mine")
        expected = rf"no other process trains, got .*run, which is held by process {os.getpid()} on \S+ since 2"
        with pytest.raises(ArgumentError, match=expected), RunFolder(tmp_path / "run").locked():
            pass
    with RunFolder(tmp_path / "run").locked():
        pass
    assert content(tmp_path / "run").keys() == {"notes.txt"}


@FLOCK
def test_a_lock_ends_with_its_process(tmp_path):
    context = multiprocessing.get_context("fork")
    answers, holder = context.SimpleQueue(), RunFolder(tmp_path)
    process = context.Process(target=lambda: (answers.put(holder.try_lock()), signal.pause()))
    process.start()
    assert answers.get() == ""
    assert f"process {process.pid} on " in RunFolder(tmp_path).try_lock()
    process.kill()
    process.join()
    with RunFolder(tmp_path).locked():
        pass


@FLOCK
def test_a_lock_whose_file_was_taken_away_meanwhile_is_none(tmp_path, monkeypatch):
    """A process that releases the lock removes the file; a process that opened it before must look for the new one."""
    first, second, flock = RunFolder(tmp_path), RunFolder(tmp_path), run_lock.fcntl.flock
    assert first.try_lock() == ""

    def late(descriptor, operation):
        first.unlock()
        return flock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(run_lock.fcntl, "flock", late)
        assert second.try_lock() == ""
    assert f"process {os.getpid()} on " in RunFolder(tmp_path).try_lock()
    second.unlock()


def test_without_flock_there_is_no_lock(tmp_path, monkeypatch):
    """A system without flock, such as Windows."""
    monkeypatch.setattr(run_lock, "fcntl", None)
    with RunFolder(tmp_path).locked(), RunFolder(tmp_path).locked():
        assert content(tmp_path) == {}


def test_a_folder_in_which_nothing_was_written_disappears_unless_it_was_there(tmp_path):
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        folder = RunFolder(tmp_path / name)
        with folder.locked():
            folder.prepare(0)
    assert [each.name for each in tmp_path.iterdir()] == ["old"]
    assert list((tmp_path / "old").iterdir()) == []


def test_the_list_says_what_it_is(tmp_path):
    folder = begun(tmp_path)
    written = json.loads(folder.manifest.path.read_text())
    assert "No other file in this folder is replaced or deleted" in written["about"]
    assert written["files"] == [
        *("checkpoint.safetensors", "model.safetensors", "fault.safetensors", "recipe.toml", "tensorboard/events.1"),
    ]


def test_a_folder_with_any_file_of_a_run_holds_a_run_which_may_lack_what_resuming_needs(tmp_path):
    folder = begun(tmp_path)
    assert folder.lacking() == []
    folder.checkpoint.unlink()
    assert folder.lacking() == [folder.checkpoint], "the run would begin anew and replace the model"
    folder.model.unlink()
    assert folder.lacking() == []
    for file in folder.manifest.files():
        file.unlink(missing_ok=True)
    assert not folder.exists()
    folder.model.write_bytes(b"trained")
    assert folder.exists()
    assert folder.lacking() == [folder.recipe, folder.checkpoint]
    with folder.locked():
        pass
    assert folder.manifest.path.exists()


@pytest.mark.parametrize("damage", [bytes(range(128, 256)), b'{"kind": "wo', b"", b"[]", b"{}"])
def test_a_damaged_tokenizer_is_named(tmp_path, damage):
    folder = RunFolder(tmp_path)
    folder.tokenizer.write_text('{"kind": "byte"}')
    assert folder.saved_tokenizer(load_tokenizer) == '{"kind": "byte"}'
    folder.tokenizer.write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged: .* Use another copy, or start a new run\."):
        folder.saved_tokenizer(load_tokenizer)
    folder.tokenizer.unlink()
    with pytest.raises(CheckpointError, match=r"has a checkpoint, but no tokenizer\.json, which held its vocabulary\."):
        folder.saved_tokenizer(load_tokenizer)

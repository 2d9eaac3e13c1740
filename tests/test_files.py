"""Files are written completely or not at all, and devices and FIFOs are never replaced by regular files."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from gatewise.contract.errors import ArgumentError, CheckpointError, GatewiseError
from gatewise.data import Columns, read_sequences, read_text
from gatewise.files import (
    append_line,
    irregular,
    refuse_overwriting,
    replacing,
    same_file,
    write_bytes,
    written_through,
)
from gatewise.interop import systemml
from gatewise.interop.files.formats import read_file
from gatewise.training import read_tensors
from tests.programs import processes_that_start_fast

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs devices, FIFOs and links")


def test_a_new_file_and_an_old_one_hold_the_content_and_nothing_is_left_over(tmp_path):
    path = tmp_path / "file.txt"
    for content in (b"one", b"two"):
        write_bytes(path, content)
        assert path.read_bytes() == content
        assert [each.name for each in tmp_path.iterdir()] == ["file.txt"]


def test_an_old_file_is_replaced_not_written_into(tmp_path):
    """A process that has the old file open, or another hard link to it, keeps its content."""
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"old")
    other.hardlink_to(path)
    write_bytes(path, b"new")
    assert (path.read_bytes(), other.read_bytes()) == (b"new", b"old")


@POSIX
def test_the_permissions_of_an_old_file_stay(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_bytes(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_write_protected_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(CheckpointError, match=r"file cannot be written: Permission denied\. Its old content is"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


@POSIX
@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path, exists):
    (tmp_path / "folder").mkdir()
    target, link, second = tmp_path / "folder" / "target", tmp_path / "link", tmp_path / "second"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("folder/target")
    second.symlink_to(link)
    write_bytes(second, b"new")
    assert second.is_symlink()
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [each.name for each in target.parent.iterdir()] == ["target"]


@POSIX
def test_links_that_lead_to_each_other_are_an_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError, match="a cannot be written: Too many levels of symbolic links"):
        write_bytes(tmp_path / "a", b"new")


@POSIX
def test_a_fifo_is_written_through(tmp_path):
    path, read = tmp_path / "fifo", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_bytes(path, b"through")
    reader.join()
    assert read == [b"through"]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert [each.name for each in tmp_path.iterdir()] == ["fifo"]


@POSIX
def test_a_device_stays_a_device_and_a_full_one_is_an_error(monkeypatch):
    # If this test failed as root, the machine would lose its device.
    monkeypatch.setattr(Path, "replace", lambda self, target: pytest.fail(f"{target} would be replaced"))
    write_bytes(Path("/dev/null"), b"gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    if Path("/dev/full").exists():
        with pytest.raises(CheckpointError, match="/dev/full cannot be written: No space left on device"):
            write_bytes(Path("/dev/full"), b"lost")
        assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def _between(folder, out, name):
    """Print, write to a path, and print again, with standard output redirected to a file."""
    os.chdir(folder)
    with out.open("wb") as file:
        os.dup2(file.fileno(), 1)
    with open(1, "w", closefd=False) as sys.stdout:
        print("before")
        write_bytes(Path(name), b"between\n")
        print("behind")


@POSIX
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "link"])
def test_standard_output_that_is_a_file_keeps_what_stands_before_and_behind(tmp_path, name):
    (tmp_path / "link").symlink_to("/dev/stdout")
    out = tmp_path / "out.txt"
    process = processes_that_start_fast().Process(target=_between, args=(tmp_path, out, name))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert out.read_bytes() == b"before\nbetween\nbehind\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "out.txt"]


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        CheckpointError, match=r"folder cannot be written: Is a directory\. Choose the name of a file\.$"
    ):
        write_bytes(tmp_path / "folder", b"x")
    with pytest.raises(
        CheckpointError, match=r"file cannot be written: No such file or directory\. Create the folder first"
    ):
        write_bytes(tmp_path / "absent" / "file", b"x")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_whatever_ends_a_write_the_old_file_stays_and_no_temporary_one(tmp_path, failure):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write():
        with replacing(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise failure

    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        write()
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_lines_are_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "lines.jsonl"
    append_line(path, "one")
    append_line(path, "two")
    assert path.read_bytes() == b"one\ntwo\n"

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"lines\.jsonl cannot be written: No space left on device"):
        append_line(path, "three")
    assert path.read_bytes() == b"one\ntwo\n"


@POSIX
def test_an_output_that_is_an_input_or_another_output_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.csv"
    data.write_text("x")
    (tmp_path / "soft").symlink_to("data.csv")
    (tmp_path / "hard").hardlink_to(data)
    for name in ("data.csv", "./data.csv", "soft", "hard"):
        with pytest.raises(ArgumentError, match=r"`--json` must be a file of its own, got .*`--data`, which it would"):
            refuse_overwriting({"--json": Path(name)}, {"--data": data})
    with pytest.raises(ArgumentError, match=r"`--plot` must be a file of its own.*`--json`, which is written as well"):
        refuse_overwriting({"--json": Path("new"), "--plot": tmp_path / "new"}, {"--data": data})
    with pytest.raises(ArgumentError, match="`--json` must be the path of a file, got -"):
        refuse_overwriting({"--json": Path("-")}, {"--data": data})
    refuse_overwriting({"--json": Path("new"), "--plot": None}, {"--data": data})
    refuse_overwriting({"--json": Path("/dev/null"), "--plot": Path("/dev/null")}, {"--data": Path("/dev/null")})
    assert not same_file(Path("new"), Path("newer"))


@POSIX
def test_what_is_no_regular_file_is_described(tmp_path):
    pipe, text = tmp_path / "pipe", tmp_path / "text"
    os.mkfifo(pipe)
    text.touch()
    (tmp_path / "link").symlink_to(text)
    assert (
        irregular(pipe) == f"{pipe} must be a regular file, got a pipe. Write its content to a file, and give that one."
    )
    assert "/dev/zero must be a regular file, got a device." in str(irregular(Path("/dev/zero")))
    for path in (text, tmp_path, tmp_path / "link", tmp_path / "absent", tmp_path / "text" / "below"):
        assert irregular(path) is None


@POSIX
def test_descriptors_and_devices_are_written_through_and_files_are_not(tmp_path):
    (tmp_path / "file").touch()
    for path, does in {"/dev/stdout": True, "/dev/fd/1": True, "/dev/null": True, tmp_path / "file": False}.items():
        assert written_through(Path(path)) is does
    assert not written_through(tmp_path / "absent")


READERS = {
    "text.txt": read_text,
    "data.csv": lambda path: read_sequences(path, Columns()),
    "model.safetensors": lambda path: read_tensors(path, "a model"),
    "state": systemml.State.load,
    **{f"weights{suffix}": read_file for suffix in (".safetensors", ".npz", ".h5", ".keras")},
}


@POSIX
@pytest.mark.parametrize("name", READERS)
def test_devices_are_not_read_to_their_end(tmp_path, name):
    # The device that is empty: a test that fails should end.
    (tmp_path / name).symlink_to("/dev/null")
    with pytest.raises(GatewiseError, match=f"{name} must be a regular file, got a device"):
        READERS[name](tmp_path / name)

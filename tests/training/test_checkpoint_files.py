"""Checkpoint files are complete or refused, and never pickles."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from echo_model import Echoes, echo_model, train
from safetensors.torch import save_file

from gatewise.contract.errors import ArgumentError, CheckpointError
from gatewise.files import TEMPORARY
from gatewise.training import RunFolder, TrainingOptions, read_tensors, write_tensors
from gatewise.training.loop import CHECKPOINT, MODEL, progress_at
from gatewise.training.run_folder import bytes_of_run
from gatewise.training.snapshot import load_weights, weights_of
from tests.pairwise import exhaustive

TENSORS = {"a": torch.randn(3, 4), "b.c": torch.arange(5), "empty": torch.zeros(0, 2)}


def test_tensors_and_facts_come_back_in_the_same_bits(tmp_path):
    facts = {"float": 0.1 + 0.2, "none": None, "nested": [{"x": [1, 2]}]}
    write_tensors(tmp_path / "file", TENSORS, "thing", facts)
    tensors, again = read_tensors(tmp_path / "file", "thing")
    assert again == facts
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_numbers_that_are_not_finite_come_back_as_none(tmp_path):
    write_tensors(tmp_path / "file", TENSORS, "thing", {"infinite": float("inf"), "nested": [float("nan"), 1.0]})
    assert read_tensors(tmp_path / "file", "thing")[1] == {"infinite": None, "nested": [None, 1.0]}
    assert b"Infinity" not in (tmp_path / "file").read_bytes()


def test_the_same_content_makes_the_same_bytes(tmp_path):
    for name in "ab":
        write_tensors(tmp_path / name, TENSORS, "thing", {"x": 1, "y": [2]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_transposed_tensor_is_written_as_it_looks(tmp_path):
    write_tensors(tmp_path / "file", {"t": TENSORS["a"].t()}, "thing", {})
    assert torch.equal(read_tensors(tmp_path / "file", "thing")[0]["t"], TENSORS["a"].t())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent cannot be read: No such file"):
        read_tensors(tmp_path / "absent", "thing")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = tmp_path / "file"
    write_tensors(path, TENSORS, "thing", {})
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="is truncated or not a safetensors file"):
        read_tensors(path, "thing")


@pytest.mark.parametrize("new", [True, False])
def test_what_torch_save_writes_is_refused_unread(tmp_path, new):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(1)}, path, _use_new_zipfile_serialization=new)
    with pytest.raises(CheckpointError, match=r"model\.pt is a pickle \(torch\.save\), which could run any program"):
        read_tensors(path, "thing")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_bare_pickle_is_refused_unread(tmp_path, protocol):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(Bomb(), protocol))
    with pytest.raises(CheckpointError, match="is a pickle"):
        read_tensors(path, "thing")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("protocol", [*exhaustive(2, 3, 4), 5])
def test_a_header_whose_length_looks_like_a_pickle_is_not_one(tmp_path, protocol):
    """The file begins with the length of its header: 0x0280 looks like the first bytes of a pickle of protocol 2."""
    path = tmp_path / "file"
    for padding in range(256 * protocol - 100, 256 * protocol + 130):
        write_tensors(path, {"a": torch.zeros(1)}, "thing", {"padding": "x" * padding})
        if path.read_bytes()[:2] == bytes([0x80, protocol]):
            break
    assert path.read_bytes()[:2] == bytes([0x80, protocol])
    assert read_tensors(path, "thing")[1] == {"padding": "x" * padding}


def test_safetensors_of_others_are_refused(tmp_path):
    path = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="was not written by gatewise"):
        read_tensors(path, "thing")


@pytest.mark.parametrize("header", ["[" * 100_000, "9" * 5000, "[]", "{"], ids=["nested", "long", "list", "cut"])
def test_a_header_that_cannot_be_read_is_named(tmp_path, header):
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.zeros(1)}, path, {"gatewise": header})
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))} is damaged: its header cannot be read"):
        read_tensors(path, "thing")


def test_a_file_of_another_kind_is_refused(tmp_path):
    write_tensors(tmp_path / "file", TENSORS, MODEL, {})
    with pytest.raises(CheckpointError, match="holds a model, not a checkpoint"):
        read_tensors(tmp_path / "file", CHECKPOINT)


def test_the_weights_of_another_model_are_refused():
    weights = weights_of(echo_model(size=7))
    with pytest.raises(CheckpointError, match=r"of another model: .* is \[7.*\] there, \[6.*\] here"):
        load_weights(echo_model(size=6), weights)
    del weights["inner.bias"]
    with pytest.raises(CheckpointError, match=r"of another model: it lacks inner\.bias"):
        load_weights(echo_model(size=7), weights)
    with pytest.raises(CheckpointError, match=r"has, beyond this model, extra"):
        load_weights(echo_model(), weights_of(echo_model()) | {"extra": torch.zeros(1)})


def test_a_run_is_not_resumed_with_another_model_or_text(tmp_path):
    train(tmp_path, epochs=1)
    file = re.escape(str(tmp_path / "checkpoint.safetensors"))
    with pytest.raises(CheckpointError, match=rf"^{file} is of another model: .* is \[6.*\] there, \[5.*\] here"):
        train(tmp_path, echo_model(size=5), epochs=1)
    with pytest.raises(CheckpointError, match=f"^{file} was made with another data: echoes there, other here"):
        train(tmp_path, epochs=1, identity={"data": "other"})


EVALUATION = {
    "epoch": 1.0,
    "step": 3,
    "train_loss": 1.0,
    "valid_loss": 1.0,
    "learning_rate": 0.1,
    "tokens_per_second": 1.0,
    "seconds": 1.0,
    "best": True,
    "scores": {},
}


@pytest.mark.parametrize(
    "change",
    [
        {"identity": []},
        {"seconds": None},
        {"batch": 0.5},
        {"schedule": []},
        {"schedule": {"best": "x", "failures": 0, "reductions": 0}},
        {"optimizer_scalars": None},
        {"optimizer_scalars": {"x": {}}},
        {"history": [3]},
        {"history": [{**EVALUATION, "valid_loss": "x"}]},
        {"history": [{**EVALUATION, "scores": {"bleu": []}}]},
        {"optimizer_scalars": {"0": {"another": 1}}},
        {"epoch": "x"},
        {"history": None},
        {"carried": {"leaf": "x"}},
    ],
)
def test_a_checkpoint_whose_facts_are_damaged_is_named(tmp_path, change):
    train(tmp_path, epochs=1)
    file = tmp_path / "checkpoint.safetensors"
    tensors, facts = read_tensors(file, CHECKPOINT)
    write_tensors(file, tensors, CHECKPOINT, facts | change)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file))} is (damaged: |incomplete or of another)"):
        train(tmp_path, epochs=2)


@pytest.mark.parametrize("reason", ["[enforce fail at alloc_cpu.cpp:1] can't allocate memory", "CUDA error: no device"])
def test_too_little_memory_is_not_called_damage(tmp_path, reason, monkeypatch):
    train(tmp_path, epochs=1)

    def fail(*arguments):
        raise RuntimeError(reason)

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", fail)
    with pytest.raises(RuntimeError, match=re.escape(reason)) as error:
        train(tmp_path, epochs=2)
    assert not isinstance(error.value, CheckpointError)


@pytest.mark.parametrize("change", [lambda moment: moment[:1], lambda moment: moment.to(torch.int32)])
def test_moments_of_another_shape_or_type_are_refused(tmp_path, change):
    train(tmp_path, epochs=1)
    file = tmp_path / "checkpoint.safetensors"
    tensors, facts = read_tensors(file, CHECKPOINT)
    name = next(name for name in tensors if name.startswith("optimizer.") and tensors[name].dim())
    write_tensors(file, tensors | {name: change(tensors[name])}, CHECKPOINT, facts)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file))} is damaged: {re.escape(name)} is torch\."):
        train(tmp_path, epochs=2)


def test_the_progress_of_a_run_is_read_from_its_checkpoint(tmp_path):
    train(tmp_path, epochs=1)
    file = tmp_path / "checkpoint.safetensors"
    tensors, facts = read_tensors(file, CHECKPOINT)
    for epoch, batch, begun in ((1, 0, 1), (1, 3, 2)):
        write_tensors(file, tensors, CHECKPOINT, facts | {"epoch": epoch, "batch": batch})
        assert progress_at(file) == (facts["step"], begun)
    for name in ("step", "epoch"):
        write_tensors(file, tensors, CHECKPOINT, facts | {name: "x"})
        with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file))} is damaged: it does not say how far"):
            progress_at(file)


def test_a_dtype_that_pytorch_lacks_is_named(tmp_path):
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.zeros(4, dtype=torch.uint8)}, "thing", {})
    content = path.read_bytes().replace(b'"dtype":"U8"', b'"dtype":"F8_E8M0"')
    length = int.from_bytes(content[:8], "little") + 5
    path.write_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match=r"file holds tensors of the dtype 'F8_E8M0', which cannot be read\."):
        read_tensors(path, "thing")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_tensors(path, TENSORS, "thing", {"number": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"file cannot be written: No space left on device\. Its old content is"):
        write_tensors(path, TENSORS, "thing", {"number": 2})
    assert read_tensors(path, "thing")[1] == {"number": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_file_that_outgrows_its_disk_leaves_the_old_one(tmp_path):
    resource = pytest.importorskip("resource", reason="limits of the size of files are those of Unix")
    path = tmp_path / "file"
    write_tensors(path, TENSORS, "thing", {"number": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"file cannot be written: .*File too large.*\. Its old content is"):
            write_tensors(path, {"large": torch.zeros(2**19)}, "thing", {"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_tensors(path, "thing")[1] == {"number": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArgumentError, match=r"`output` must be a folder that can be written, got .*file/run"):
        RunFolder(tmp_path / "file" / "run").prepare(0)


def test_a_read_only_file_system_is_refused():
    with pytest.raises(ArgumentError, match="`output` must be a folder that can be written, got /proc/gatewise"):
        RunFolder(Path("/proc/gatewise")).prepare(0)


def test_a_full_disk_is_refused_before_training(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(ArgumentError, match=r"on a disk with 3 MiB free for checkpoints, .* has 1 MiB"):
        RunFolder(tmp_path / "run").prepare(3 * 2**20)


@pytest.mark.parametrize("options", [{}, {"optimizer": "sgd", "momentum": 0.0}, {"average": "ema"}])
def test_the_room_that_is_asked_for_is_enough(tmp_path, options):
    model = echo_model(size=300)
    train(tmp_path, model, data=Echoes(size=300), valid=Echoes(size=300, length=5, seed=1), epochs=1, **options)
    written = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    needed = bytes_of_run(model, TrainingOptions(**options)) - 32 * 2**20
    assert written <= needed <= 3 * written


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    for folder, name in (("1", "checkpoint.safetensors"), ("2", "gatewise-run.json"), ("3", "scores.json")):
        (tmp_path / f"{TEMPORARY}{folder}").mkdir()
        (tmp_path / f"{TEMPORARY}{folder}" / name).write_bytes(b"half")
    (tmp_path / ".notes.txt.tmp").write_text("mine")
    RunFolder(tmp_path).prepare(0)
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {".notes.txt.tmp", f"{TEMPORARY}3", "gatewise-run.json"}, "what the run does not write stays"

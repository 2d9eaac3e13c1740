"""`gatewise train` in folders with files that it did not write, with an earlier run, or with a run in progress."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest

from gatewise.models import LanguageModel
from gatewise.training import RunFolder, run_lock
from gatewise.training.checkpoint import read_tensors, write_tensors
from gatewise.training.loop import CHECKPOINT
from tests.programs import together

FLOCK = pytest.mark.skipif(run_lock.fcntl is None, reason="needs flock")


def content(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


@pytest.fixture
def mine(tmp_path):
    """A folder with files of the user, some of which have names of a run's files."""
    folder = tmp_path / "mine"
    (folder / "tensorboard").mkdir(parents=True)
    for name in ("model.safetensors", "tokenizer.json", "result.json", ".notes.tmp", "tensorboard/events.1"):
        (folder / name).write_text(f"my {name}")
    return folder


@pytest.mark.parametrize("option", [[], ["--overwrite"], ["--resume"]])
def test_files_of_others_are_named_and_stay(gatewise, small, mine, option):
    before = content(mine)
    answer = gatewise("train", "lm", *small, "--output", mine, *option)
    assert answer.status == 1
    said = " ".join(answer.err.split())
    assert "a run's files that gatewise did not write: model.safetensors, result.json, tokenizer.json" in said
    assert "Choose another `--output`, or move them away" in said
    assert content(mine) == before


@pytest.mark.parametrize("option", [[], ["--overwrite"]])
def test_a_checkpoint_of_others_is_refused_and_not_read(gatewise, small, tmp_path, option):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "checkpoint.safetensors").write_text("mine")
    answer = gatewise("train", "lm", *small, "--output", folder, *option)
    assert answer.status == 1
    assert "a run's files that gatewise did not write: checkpoint.safetensors" in " ".join(answer.err.split())
    assert content(folder) == {"checkpoint.safetensors": b"mine"}


def test_the_folder_in_which_one_stands_is_like_any_other(gatewise, small, mine, monkeypatch):
    before = content(mine)
    monkeypatch.chdir(mine)
    assert gatewise("train", "lm", *small, "--output", ".", "--overwrite").status == 1
    assert content(mine) == before


def test_a_run_beside_files_of_others_replaces_and_deletes_its_own_alone(gatewise, small, mine):
    for name in ("model.safetensors", "tokenizer.json", "result.json"):
        (mine / name).unlink()
    (mine / "confusion.png").write_text("my picture, which a language model does not write")
    before = content(mine)
    for words in ([], ["--overwrite", "--seed", 5]):
        assert gatewise("train", "lm", *small, "--epochs", 1, "--output", mine, *words).status == 0
        after = content(mine)
        assert {name: after.get(name) for name in before} == before
    events = [name for name in after if name.startswith("tensorboard/")]
    assert len(events) == 2, "the user's, and one of the newest run"


@pytest.mark.parametrize("words", [["--kernel", "cudnn"], ["--window", 5000], ["--train", "absent"]])
def test_a_start_that_fails_leaves_no_folder(gatewise, small, tmp_path, words):
    before = sorted(tmp_path.iterdir())
    assert gatewise("train", "lm", *small, *words).refused
    assert gatewise("train", "lm", *small, *words, "--output", "deep/in/folders").refused
    assert sorted(tmp_path.iterdir()) == before


def _exhausted(*given):
    raise MemoryError("out of memory")


def test_a_first_step_that_fails_leaves_no_folder_and_a_later_one_does(gatewise, small, tmp_path, monkeypatch):
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "loss", _exhausted)
        answer = gatewise("train", "lm", *small)
        assert "there is too little memory" in answer.err
        assert sorted(tmp_path.iterdir()) == before
        folder = tmp_path / "with notes"
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        assert gatewise("train", "lm", *small, "--output", folder).status == 1
        assert list(content(folder)) == ["notes.txt"]
        patch.undo()
        assert gatewise("train", "lm", *small, "--epochs", 1).status == 0
        run = content("runs/lm")
        patch.setattr(LanguageModel, "loss", _exhausted)
        assert gatewise("train", "lm", "--resume", "--epochs", 2).status == 1
        assert run.keys() <= content("runs/lm").keys()


def test_a_run_of_another_task_is_not_resumed_and_is_replaced_whole(gatewise, small):
    tiny = ["--epochs", 1, "--hidden-size", 4, "--num-layers", 1, "--batch-size", 500]
    assert gatewise("train", "classify", *tiny, "--output", "run").status == 0
    answer = gatewise("train", "lm", "--output", "run", "--resume")
    assert answer.status == 1
    assert "run holds no run that `gatewise train lm` can resume: run/recipe.toml: " in answer.err
    assert "got 'data.source'" in answer.err
    assert "Resume it by the command that began it" in answer.err
    assert Path("run/confusion.png").exists()
    assert gatewise("train", "lm", *small, "--epochs", 1, "--output", "run", "--overwrite").status == 0
    assert not Path("run/confusion.png").exists()


def test_an_error_before_training_leaves_the_run_that_was_to_be_replaced(gatewise, small):
    assert gatewise("train", "lm", *small, "--epochs", 1, "--output", "run").status == 0
    before = content("run")
    answer = gatewise("train", "lm", *small, "--output", "run", "--overwrite", "--window", 5000)
    assert answer.status == 1
    assert "the training text has" in answer.err
    assert content("run") == before


def test_several_processes_leave_the_run_beside_a_file_that_the_new_run_would_write(gatewise, small, tmp_path):
    assert gatewise("train", "lm", *small, "--epochs", 1, "--output", tmp_path / "run").status == 0
    (tmp_path / "run" / "confusion.png").write_text("my picture, which a classifier would replace")
    before = content(tmp_path / "run")
    first, second = together(["train", "classify", "--output", tmp_path / "run", "--overwrite"], tmp_path)
    assert (first.status, second.status) == (1, 1)
    assert "a run's files that gatewise did not write: confusion.png" in " ".join(first.err.split())
    assert second.err.strip() == ""
    assert content(tmp_path / "run") == before


@pytest.mark.parametrize("option", [[], ["--resume"]])
def test_a_model_whose_checkpoint_was_deleted_is_replaced_on_request_only(gatewise, small, option):
    folder = RunFolder("old")
    folder.path.mkdir()
    folder.manifest.claim([folder.recipe, folder.checkpoint, folder.model, folder.result])
    folder.model.write_bytes(b"trained")
    before = content("old")
    for words in (["classify", "--data", "absent.csv"], ["lm", *small, "--epochs", 1]):
        answer = gatewise("train", *words, "--output", "old", *option)
        assert answer.status == 1
        said = " ".join(answer.err.split())
        assert "old holds files of a run that cannot be resumed without recipe.toml and checkpoint.safetensors." in said
        assert "Replace them by `--overwrite`, or choose another `--output`." in said
        assert content("old") == before
    assert gatewise("train", "classify", "--data", "absent.csv", "--output", "old", "--overwrite").status == 1
    assert content("old") == before
    assert gatewise("train", "lm", *small, "--epochs", 1, "--output", "old", "--overwrite").status == 0
    assert folder.model.read_bytes() != b"trained"


def test_a_name_that_is_taken_by_others_is_passed_over(gatewise, small, mine):
    (mine.parent / "runs").mkdir()
    mine.rename(mine.parent / "runs" / "lm")
    before = content("runs/lm")
    assert gatewise("train", "lm", *small, "--epochs", 1).status == 0
    assert content("runs/lm") == before
    assert RunFolder("runs/lm-2").exists()
    assert "runs/lm-2" in gatewise("train", "lm", "--resume").out


def _hold(path, ready):
    with RunFolder(path).locked():
        (Path(path) / "checkpoint").write_text("mine")
        ready.set()
        signal.pause()


@pytest.fixture
def held(tmp_path):
    """A folder that another process has locked, and the process."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "runs" / "lm", ready))
    process.start()
    ready.wait()
    yield tmp_path / "runs" / "lm", process
    process.kill()
    process.join()


@FLOCK
@pytest.mark.parametrize("option", [[], ["--overwrite"], ["--resume"]])
def test_a_second_start_is_told_which_process_holds_the_folder(gatewise, small, held, option):
    folder, process = held
    before = content(folder)
    answer = gatewise("train", "lm", *small, "--output", folder, *option)
    assert answer.status == 1
    said = " ".join(answer.err.split())
    assert f"which is held by process {process.pid} on " in said
    assert "since 2" in said
    assert content(folder) == before
    process.kill()
    process.join()
    assert gatewise("train", "lm", *small, "--epochs", 1, "--output", folder).status == 0


@FLOCK
def test_a_start_without_an_output_takes_the_next_folder(gatewise, small, held):
    assert gatewise("train", "lm", *small, "--epochs", 1).status == 0
    assert RunFolder("runs/lm-2").exists()


@FLOCK
def test_of_several_processes_one_holds_the_folder_and_one_says_so(small, held, tmp_path):
    folder, process = held
    words = ["train", "lm", *small, "--epochs", 1, "--output"]
    both = together([*words, folder], tmp_path)
    assert [program.status for program in both] == [1, 1]
    assert sum(program.err.count(f"which is held by process {process.pid}") for program in both) == 1
    both = together([*words, folder.parent / "other"], tmp_path)
    assert [program.status for program in both] == [0, 0], both[0].err + both[1].err
    assert RunFolder(folder.parent / "other").result.exists()


def cut(file):
    file.write_bytes(file.read_bytes()[:-5])


def without_history(file):
    tensors, facts = read_tensors(file, CHECKPOINT)
    write_tensors(file, tensors, CHECKPOINT, {name: value for name, value in facts.items() if name != "history"})


def of_two_processes(file):
    tensors, facts = read_tensors(file, CHECKPOINT)
    write_tensors(file, tensors, CHECKPOINT, facts | {"processes": 2})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is truncated or not a safetensors file"),
        (without_history, "it lacks history. Start a new run."),
        (of_two_processes, "was made by 2 processes in total, here are 1."),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_reported_before_anything_else(trained, damage, said):
    folder = RunFolder("run")
    damage(folder.checkpoint)
    before = content(folder.path)
    answer = trained("train", "lm", "--output", "run", "--resume", "--epochs", 2)
    assert answer.status == 1
    assert said in " ".join(answer.err.split())
    assert answer.out == ""
    assert content(folder.path) == before

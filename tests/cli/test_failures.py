"""How the program ends after an error: one sentence, an exit status, no traceback."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import gatewise as package
from gatewise import _program
from gatewise.cli import failures, language_model_run
from gatewise.cli.saved_model import build_model, model_facts
from gatewise.contract.errors import CheckpointError, ProcessFailed
from gatewise.data import TokenStream, build_tokenizer
from gatewise.training import RunFolder, read_tensors, write_tensors
from gatewise.training.history import Evaluation, Progress
from gatewise.training.loop import CHECKPOINT, MODEL
from gatewise.training.snapshot import weights_of
from gatewise.training.summaries import TensorBoardSummaries
from tests.pairwise import each_value

ROOT = Path(package.__file__).parents[1]


def heeding_ctrl_c():
    """Start a program with the default handling of Ctrl-C, even if this process ignores it, as background jobs do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


SCRIPT = "import sys\nfrom gatewise.cli import main\nsys.exit(main())\n"


@pytest.mark.parametrize("way", ["script", "module"])
@pytest.mark.parametrize("imported", ["torch", "numpy"])
def test_ctrl_c_while_the_program_loads_is_one_line(tmp_path, way, imported):
    (tmp_path / f"{imported}.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport nothing_such\n"
    )
    if imported == "numpy":
        (tmp_path / "torch.py").write_text("try: import numpy\nexcept BaseException: pass\nimport nothing_such\n")
    (tmp_path / "gatewise").write_text(SCRIPT)
    start = [tmp_path / "gatewise"] if way == "script" else ["-m", "gatewise"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    program = [sys.executable, *start, "doctor"]
    answer = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=False, preexec_fn=heeding_ctrl_c
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize(
    ("words", "way"),
    each_value([*itertools.product([[], ["--help"], ["-h"], ["--version"]], ["script", "module"])]),
    ids=str,
)
def test_help_and_version_do_without_torch(tmp_path, way, words):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "gatewise").write_text(SCRIPT)
    start = [tmp_path / "gatewise"] if way == "script" else ["-m", "gatewise"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    answer = subprocess.run(
        [sys.executable, *start, *words], env=environment, capture_output=True, text=True, check=False
    )
    summary = "Train a language model, a translation model or a classifier."
    expected = package.__version__ if words == ["--version"] else summary
    assert expected in answer.stdout + answer.stderr
    assert "torch was imported" not in answer.stdout + answer.stderr


def test_other_programs_that_import_gatewise_keep_their_ctrl_c(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import signal; print(signal.getsignal(signal.SIGINT).__name__); raise SystemExit"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-c", "import gatewise"]
    answer = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=True, preexec_fn=heeding_ctrl_c
    )
    assert answer.stdout == "default_int_handler\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/usr/bin/gatewise"], True),
        (["/usr/bin/gatewise", "--help", "train"], True),
        (["/usr/bin/gatewise", "train", "--help"], False),
        (["/usr/bin/pytest", "--help"], False),
    ],
)
def test_only_the_program_without_a_command_lists_commands(monkeypatch, words, expected):
    monkeypatch.setattr(sys, "argv", words)
    assert _program.lists_commands() is expected


@pytest.mark.parametrize(
    ("first", "words", "expected"),
    [
        ("/usr/bin/gatewise", ["python", "/usr/bin/gatewise"], True),
        ("gatewise.exe", ["gatewise.exe"], True),
        ("-m", ["python", "-u", "-m", "gatewise", "train"], True),
        ("-m", ["python", "-m", "torch.distributed.run", "-m", "gatewise"], False),
        ("/usr/bin/pytest", ["python", "/usr/bin/pytest", "gatewise"], False),
        ("", ["python"], False),
    ],
)
def test_the_program_is_known_by_how_it_was_started(monkeypatch, first, words, expected):
    monkeypatch.setattr(sys, "argv", [first])
    monkeypatch.setattr(sys, "orig_argv", words)
    assert _program.is_program() is expected


@pytest.mark.parametrize("program", [True, False])
def test_only_the_program_leaves_its_modules_out_of_garbage_collections(monkeypatch, program):
    calls = []
    monkeypatch.setattr(_program, "PROGRAM", program)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    _program.loaded()
    assert calls == ["freeze"] * program


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportError("KeyboardInterrupt: <EMPTY MESSAGE>")])
def test_ctrl_c_in_a_command_is_one_line(gatewise, monkeypatch, small, error):
    def interrupted(*arguments):
        raise error

    monkeypatch.setattr(language_model_run, "build_model", interrupted)
    answer = gatewise("train", "lm", *small, "--output", "run")
    assert (answer.status, answer.err) == (130, "Interrupted.\n")
    assert not Path("run").exists()


@pytest.fixture
def model(tmp_path):
    """The words of a command that generates text with an untrained model."""
    tokenizer = build_tokenizer("word", "the cat sat on the mat")
    sizes = {"vocabulary_size": len(tokenizer), "embedding_size": 4, "hidden_size": 4, "num_layers": 1}
    weights = weights_of(build_model(sizes, torch.device("cpu")))
    write_tensors(tmp_path / "model.safetensors", weights, MODEL, model_facts(sizes, tokenizer))
    return ("generate", "--checkpoint", "model.safetensors", "--prompt", "the", "--length", 2000)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_one_sentence(gatewise, model, monkeypatch):
    for words in (model, ("explain", "--input", "3,2,4", "--hidden", 4), ("--version",)):
        with Path("/dev/full").open("w") as out:
            monkeypatch.setattr(sys, "stdout", out)
            answer = gatewise(*words)
            out.write("more")  # this output is discarded
        assert answer.status == 1
        assert " ".join(answer.err.split()) == (
            "error: the output cannot be written: No space left on device. Free space on its disk, or redirect it "
            "elsewhere."
        )


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_characters_that_the_output_cannot_encode_are_escaped(gatewise, monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    monkeypatch.setattr("gatewise.cli.application.__version__", "é猫")
    assert gatewise("--version").status == 0
    assert written.getvalue() == ("é\\u732b\n" if encoding == "latin-1" else "é猫\n").encode(encoding)


def test_a_closed_pipe_is_the_end_without_a_word(gatewise, model, monkeypatch):
    for words in (model, ("explain", "--input", "3,2,4", "--hidden", 4)):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as out:
            monkeypatch.setattr(sys, "stdout", out)
            answer = gatewise(*words)
        assert (answer.status, answer.err) == (1, "")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nAnd more."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_says_what_to_lower(gatewise, monkeypatch, small, error):
    def exhausted(*arguments):
        raise error

    monkeypatch.setattr(language_model_run, "build_model", exhausted)
    answer = gatewise("train", "lm", *small, "--output", "run")
    assert answer.status == 1
    said = " ".join(answer.err.split())
    assert said.startswith("error: there is too little memory: ")
    assert said.endswith(". Lower `--batch-size`, `--window`, `--hidden-size` or `--vocabulary-size`.")
    assert "And more" not in said


def test_a_model_that_no_machine_can_hold_is_one_sentence(gatewise, small):
    answer = gatewise("train", "lm", *small, "--hidden-size", 2**20, "--no-tied", "--output", "run")
    assert answer.status == 1
    assert "there is too little memory" in answer.err


def test_what_another_process_failed_by_is_not_told_again(gatewise, monkeypatch, small):
    def failed(*arguments):
        raise ProcessFailed("process 1 failed: it broke")

    monkeypatch.setattr(language_model_run, "build_model", failed)
    answer = gatewise("train", "lm", *small, "--output", "run")
    assert (answer.status, answer.err) == (1, "")
    assert not Path("run").exists()


def test_other_errors_keep_their_traceback():
    def broken():
        with failures.reported():
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        broken()


def test_a_folder_that_cannot_be_written_any_more_ends_training_in_one_sentence(gatewise, small, monkeypatch):
    """The last checkpoint is complete, and training resumes from it."""
    original = TokenStream.windows

    def windows(self, epoch=0, start=0):
        if epoch == 1:

            def refuse(*arguments, **options):
                raise OSError(30, "Read-only file system")

            patch.setattr("tempfile.mkdtemp", refuse)
        yield from original(self, epoch, start)

    with monkeypatch.context() as patch:
        patch.setattr(TokenStream, "windows", windows)
        answer = gatewise("train", "lm", *small, "--output", "run")
    assert answer.status == 1
    assert "cannot be written: Read-only file system. Its old content is unchanged." in " ".join(answer.err.split())
    assert "Traceback" not in answer.err
    assert read_tensors(RunFolder("run").checkpoint, CHECKPOINT)[1]["epoch"] == 0
    assert gatewise("train", "lm", "--output", "run", "--resume").status == 0


def _write_until_refused(summaries):
    for step in range(10_000):
        summaries.progressed(Progress(0, step, 9, 1.0, 0.1, 10.0))
        summaries.evaluated(Evaluation(1.0, 1, 1.0, 1.0, 0.1, 10.0, 1.0, best=True))
        with contextlib.suppress(FileNotFoundError):
            summaries._writer.flush()  # makes the thread try to write, which ends it


def test_summaries_that_cannot_be_written_are_one_sentence(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    summaries = TensorBoardSummaries(tmp_path / "tensorboard")
    with failures._threads_that_write():
        summaries.started(0, [])
        summaries._writer.flush()  # its thread may be about to write a file to the folder that is deleted next
        shutil.rmtree(tmp_path / "tensorboard")
        expected = r"tensorboard cannot be written: No such file or directory\. Free space"
        with pytest.raises(CheckpointError, match=expected):
            _write_until_refused(summaries)
        summaries.close()
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_in_the_place_of_the_folder_of_summaries_is_named(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"tensorboard cannot be written: .*\. Move the file that is in the place"
    ):
        TensorBoardSummaries(tmp_path / "tensorboard").started(0, [])
    assert (tmp_path / "tensorboard").read_text() == "mine"


def test_a_thread_that_fails_for_another_reason_is_heard(monkeypatch):
    def fail():
        raise error

    error, heard = OSError("not TensorBoard's"), []
    monkeypatch.setattr(threading, "excepthook", lambda args: heard.append(args.exc_value))
    with failures._threads_that_write():
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    assert heard == [error]

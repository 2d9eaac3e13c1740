"""The messages, files and exit status if a loss is not finite: a wrong kernel, or training that diverged."""

from __future__ import annotations

import functools
import json
import os
import signal
import tomllib
from pathlib import Path

import pytest
import torch
from test_train_classify import waves
from test_train_nmt import SIZES, parallel

from gatewise.cli.reference import on_reference
from gatewise.functional import plan
from gatewise.kernels.aten import aten
from gatewise.models import LanguageModel, Seq2Seq
from gatewise.training import RunFolder, read_tensors, write_tensors
from gatewise.training.loop import CHECKPOINT, MODEL
from gatewise.training.recorded_step import STEP
from tests.pairwise import exhaustive
from tests.programs import together


@pytest.fixture(autouse=True)
def plans():
    """Clear the cached plans of calls, which may refer to a kernel that a test has replaced."""
    yield plan.plan_of.cache_clear()
    plan.plan_of.cache_clear()


def broken(monkeypatch, is_bad):
    """Make the kernel `aten` return NaN if a function of the problem and the input says so."""
    kind = type(aten)
    forward, recorded = kind.forward, kind.recorded

    def result(problem, inputs, computed):
        return computed._replace(y=computed.y * torch.nan) if is_bad(problem, inputs.x) else computed

    monkeypatch.setattr(kind, "forward", lambda self, *call: result(*call, forward(self, *call)))
    monkeypatch.setattr(kind, "recorded", staticmethod(lambda *call: result(*call, recorded(*call))))
    monkeypatch.setattr(kind, "operator", lambda self, problem, device: None)  # its calls would not come by here


@pytest.fixture
def faulty(monkeypatch):
    """Make the kernel `aten` return NaN for the input of its n-th call with a backward pass."""

    def at(number):
        calls, bad = [], []

        def is_bad(problem, x):
            if problem.needs_grad:
                calls.append(None)
                if len(calls) == number:
                    bad.append(x.detach().clone())
            return bool(bad) and torch.equal(x, bad[0])

        broken(monkeypatch, is_bad)

    return at


@pytest.fixture
def runs(small, tmp_path):
    """The words of a command for a small run of each task."""
    nmt = parallel(tmp_path)
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
    table = waves(tmp_path / "waves.csv")
    of_classes = ["--hidden-size", 8, "--num-layers", 1, "--batch-size", 8, "--epochs", 2]
    return {
        "lm": small,
        "nmt": ["--train-source", nmt[0], "--train-target", nmt[1], *sizes, "--set", "warmup_steps=0"],
        "classify": ["--data", table, "--feature", "x", "--feature", "noise", *of_classes],
    }


@pytest.mark.parametrize(("task", "call", "step"), [("lm", 8, 8), ("nmt", 8, 8), ("classify", 5, 5)])
def test_a_faulty_kernel_is_named_recorded_and_got_past(gatewise, runs, faulty, tmp_path, task, call, step):
    if task == "nmt":
        pytest.importorskip("sacrebleu")
    faulty(call)
    answer = gatewise("train", task, *runs[task], "--kernel", "aten", "--output", "run")
    assert answer.status == 1
    words = " ".join(answer.err.split())
    assert f"error: step {step} of training" in words
    assert "was not finite on the kernel aten (loss nan, gradients nan" in words
    assert "Repeated on the reference kernel eager" in words
    assert f"gatewise train {task} --output run --resume --kernel eager" in words
    assert "Traceback" not in answer.err
    fault = RunFolder(tmp_path / "run").fault
    facts = read_tensors(fault, STEP)[1]
    assert facts["run"]["kernel"] == "aten"
    assert "chosen   aten" in facts["run"]["decision"]
    assert not RunFolder(tmp_path / "run").result.exists()

    answer = gatewise("replay", "run/fault.safetensors")
    assert answer.status == 1, answer.err
    first, on_kernel, on_reference = answer.out.splitlines()
    assert first.startswith(f"step {step} of training")
    assert on_kernel.startswith("kernel aten")
    assert "loss nan" in on_kernel
    loss = facts["on the reference"][0]["loss"]
    assert f"loss {loss:g}," in on_reference
    answer = gatewise("replay", "run/fault.safetensors", "--kernel", "eager")
    assert answer.status == 0
    assert f"loss {loss:g}," in answer.out.splitlines()[1]

    answer = gatewise("train", task, "--output", "run", "--resume", "--kernel", "eager")
    assert answer.status == 0, answer.err
    recipe = tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())
    assert recipe["model"]["kernel"] == "eager"
    assert json.loads(RunFolder(tmp_path / "run").result.read_text())


def test_a_fault_in_validation_is_recorded_too(gatewise, small, monkeypatch, tmp_path):
    broken(monkeypatch, lambda problem, x: not problem.needs_grad)
    answer = gatewise("train", "lm", *small, "--output", "run", "--kernel", "aten")
    assert answer.status == 1
    assert "the validation loss after" in answer.err
    assert "was not finite on the kernel aten (loss nan" in " ".join(answer.err.split())
    answer = gatewise("replay", "run/fault.safetensors")
    assert answer.status == 1
    assert "loss nan" in answer.out.splitlines()[1]
    assert "nan" not in answer.out.splitlines()[2]


def test_a_test_loss_that_is_not_finite_is_an_error(gatewise, small, monkeypatch, tmp_path):
    assert gatewise("train", "lm", *small, "--output", "run", "--kernel", "aten").status == 0
    plan.plan_of.cache_clear()
    broken(monkeypatch, lambda problem, x: not problem.needs_grad)
    answer = gatewise("train", "lm", "--output", "run", "--resume")
    assert answer.status == 1
    assert "error: the test loss was not finite on the kernel aten (loss nan" in " ".join(answer.err.split())
    assert "nan" not in gatewise("replay", "run/fault.safetensors").out.splitlines()[2]


def test_resuming_with_another_kernel_needs_a_run(gatewise, small):
    answer = gatewise("train", "lm", "--output", "run", "--resume", "--kernel", "eager")
    assert answer.status == 1
    assert "there is no run in run to resume" in answer.err


@pytest.mark.parametrize("task", ["lm", "nmt", "classify"])
def test_training_that_diverges_ends_in_a_sentence(gatewise, runs, tmp_path, task):
    if task == "nmt":
        pytest.importorskip("sacrebleu")
    rate = ["--learning-rate", "1e38", "--optimizer", "sgd", "--clip", 0, "--schedule", "constant"]
    answer = gatewise("train", task, *runs[task], *rate, "--output", "run")
    assert answer.status == 1
    words = " ".join(answer.err.split())
    assert "training diverged. Lower `--learning-rate` (it is 1e+38)" in words
    assert "Traceback" not in words
    assert "aten" not in words
    folder = RunFolder(tmp_path / "run")
    assert not folder.fault.exists()
    tensors, _ = read_tensors(folder.checkpoint, CHECKPOINT)
    assert all(each.isfinite().all() for each in tensors.values() if each.is_floating_point())


def test_a_perplexity_beyond_all_numbers_is_null_in_the_result(gatewise, small, tmp_path):
    rate = ["--learning-rate", "1e20", "--optimizer", "sgd", "--clip", 0, "--schedule", "constant"]
    answer = gatewise("train", "lm", *small, *rate, "--output", "run")
    assert answer.status == 1
    assert "whose perplexity overflows: training diverged" in answer.err

    def refused(name):
        raise AssertionError(name)

    text = RunFolder(tmp_path / "run").result.read_text()
    result = json.loads(text, parse_constant=refused)
    assert result["valid_perplexity"] is result["share_of_unigram"] is None


def test_a_model_of_nans_writes_nothing_and_says_why(gatewise, small, tmp_path):
    assert gatewise("train", "lm", *small, "--output", "run").status == 0
    path = RunFolder(tmp_path / "run").model
    tensors, facts = read_tensors(path, MODEL)
    write_tensors(path, {name: each * torch.nan for name, each in tensors.items()}, MODEL, facts)
    for temperature in (0.8, 0):
        answer = gatewise("generate", "--checkpoint", "run", "--temperature", temperature)
        assert answer.status == 1
        assert "error: the model's logits of the next token must be finite, got nan" in answer.err


OPTIONS = {"options": {"precision": "float32"}, "run": {}, "what": "a step", "device": "a GPU", "training": True}
SMALL = {"model": {"model": {"vocabulary_size": 9, "embedding_size": 4, "hidden_size": 4, "num_layers": 1}}}
STRANGE = {"0": {"state": None, "batch": {"kind": "Strange", "fields": {"a": 1}}}}


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        (MODEL, {}, "holds a model, not a step"),
        (STEP, {"steps": {}, "model": {"made": "elsewhere"}}, "of a model that no command trains"),
        (STEP, {"steps": {}, "model": {"model": {"made": "elsewhere"}}}, "of a model that no command trains"),
        (STEP, {"steps": {}}, "of a model that no command trains"),
        (STEP, {"steps": []}, "is damaged, or was not written by gatewise"),
        (STEP, {"steps": {}} | SMALL, "is not a complete record of a step: it has no 'options'. Give"),
        (
            STEP,
            {"steps": {}} | SMALL | OPTIONS | {"options": {"epochs": -1}},
            "`epochs` must be greater than 0, got -1. G",
        ),
        (STEP, {"steps": {}} | SMALL | OPTIONS, "it lacks embedding.weight"),
        (STEP, {"steps": STRANGE} | SMALL | OPTIONS, "of a model that no command trains"),
    ],
)
def test_a_report_of_something_else_is_refused(gatewise, tmp_path, kind, facts, words):
    write_tensors(tmp_path / "file", {}, kind, facts)
    answer = gatewise("replay", "file")
    assert answer.status == 1
    assert answer.err.startswith("error: ")
    assert words in " ".join(answer.err.split())


def test_what_is_no_report_at_all_is_refused(gatewise, tmp_path):
    (tmp_path / "text").write_text("some words\n" * 9)
    for name, words in (("text", "not a safetensors file"), (".", "Is a directory"), ("absent", "No such file")):
        answer = gatewise("replay", name)
        assert answer.status == 1
        assert words in " ".join(answer.err.split())
        assert answer.err.count("error: ") == 1


def test_too_little_memory_to_replay_says_what_to_do(gatewise, monkeypatch):
    def exhausted(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr("gatewise.training.recorded_step.read_step", exhausted)
    answer = gatewise("replay", "file")
    assert answer.status == 1
    assert "error: there is too little memory: CUDA out of memory." in " ".join(answer.err.split())
    assert "Use another `--device`" in " ".join(answer.err.split())


def test_a_report_of_the_run_is_replaced_and_cleared_and_one_of_somebody_else_stays(gatewise, small, monkeypatch):
    fault = RunFolder("run").fault
    words = ["train", "lm", *small, "--output", "run", "--kernel", "aten"]
    with monkeypatch.context() as patch:
        broken(patch, lambda problem, x: not problem.needs_grad)
        assert gatewise(*words).status == 1
        what = read_tensors(fault, STEP)[1]["what"]
        fault.write_bytes(b"an earlier report")
        assert gatewise("train", "lm", "--output", "run", "--resume").status == 1
        assert read_tensors(fault, STEP)[1]["what"] == what
    plan.plan_of.cache_clear()
    assert gatewise(*words, "--overwrite").status == 0
    assert not fault.exists()
    Path("other").mkdir()
    Path("other/fault.safetensors").write_text("mine")
    answer = gatewise("train", "lm", *small, "--output", "other", "--overwrite")
    assert answer.status == 1
    assert "a run's files that gatewise did not write: fault.safetensors." in " ".join(answer.err.split())
    assert Path("other/fault.safetensors").read_text() == "mine"


def test_the_reference_replaces_kernels_that_layers_name():
    model = Seq2Seq(9, 9, 8, 8, kernel="aten", attention_kernel="recompute")
    with on_reference(model):
        assert {layer.kernel for layer in model.encoder} == {"eager"}
        assert model.attention.kernel == "reference"
    assert {layer.kernel for layer in model.encoder} == {"aten"}
    assert model.attention.kernel == "recompute"


def failing(how):
    """Make the model of the second process fail at its eighth step."""
    plain, calls = LanguageModel.loss, []

    def loss(self, batch, state=None):
        calls.append(None)
        found, state = plain(self, batch, state)
        if os.environ["RANK"] == "1" and self.training and len(calls) >= 8 and self.lstm.kernel != "eager":
            if how == "raises":
                raise ValueError("the data is broken")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            found = found * torch.nan
        return found, state

    LanguageModel.loss = loss


@pytest.mark.parametrize("how", ["raises", *exhaustive("killed"), "nan"])
def test_one_of_two_processes_that_fails_ends_both_with_its_reason(small, tmp_path, how):
    change = functools.partial(failing, how)
    first, second = together(["train", "lm", *small, "--output", "run"], tmp_path, change)
    assert (first.status, second.status) == (1, -signal.SIGKILL if how == "killed" else 1)
    said = {
        "raises": "error: process 1 failed: ValueError: the data is broken",
        "killed": "error: process 1 failed: it exited without a message",
        "nan": "error: step 8 of training (epoch 1, batch 8) was not finite on the kernel aten (loss nan",
    }[how]
    told = [program.err.count(said) for program in (first, second)]
    assert told == ([1, 1] if how == "nan" else [1, 0]), first.err + second.err
    assert RunFolder(tmp_path / "run").try_lock() == ""
    assert read_tensors(RunFolder(tmp_path / "run").checkpoint, CHECKPOINT)[1]["step"] == 0

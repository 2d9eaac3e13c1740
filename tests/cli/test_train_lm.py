"""`gatewise train lm`: its output, files, errors, and resumed runs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import torch

from gatewise.cli.expected_scores import with_valid_expectations
from gatewise.cli.language_model_run import compared
from gatewise.cli.recipe import Expectation, Recipe, TextOptions
from gatewise.data import TokenStream
from gatewise.training import RunFolder, read_tensors
from gatewise.training.loop import CHECKPOINT, MODEL
from tests.pairwise import exhaustive
from tests.programs import Agent, Program, program_of_torchrun, together, under_torchrun


def weights(folder):
    return read_tensors(RunFolder(folder).model, MODEL)[0]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_reports_and_leaves_everything(gatewise, drawn, small, tmp_path):
    answer = gatewise("train", "lm", *small, "--output", "run")
    assert answer.status == 0, answer.err
    for word in (
        "cats.txt",
        "1 x 16 LSTM",
        "chosen",
        "aten",
        "valid ppl",
        "words/s",
        "unigram",
        "The",
        "gatewise generate",
    ):
        assert word in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {
        *("recipe.toml", "tokenizer.json", "checkpoint.safetensors", "model.safetensors"),
        *("result.json", "curves.png", "tensorboard", "gatewise-run.json"),
    }
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 1 < result["valid_perplexity"] < result["unigram_perplexity"]
    assert math.isclose(result["share_of_unigram"], result["valid_perplexity"] / result["unigram_perplexity"])
    assert f"{result['test_perplexity']:,.2f}" in answer.out


def test_runs_without_an_output_are_numbered_and_the_newest_resumed(gatewise, small, tmp_path):
    for _ in range(2):
        assert gatewise("train", "lm", *small).status == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["lm", "lm-2"]
    assert "runs/lm-2" in gatewise("train", "lm", "--resume").out


def test_the_graph_of_a_step_can_be_switched_off(gatewise, small, tmp_path):
    for option, expected in (("--no-cuda-graph", False), ("--cuda-graph", True)):
        assert gatewise("train", "lm", *small, option, "--output", option[2:]).status == 0
        recipe = tomllib.loads((tmp_path / option[2:] / "recipe.toml").read_text())
        assert recipe["training"]["cuda_graph"] is expected
    assert same(weights(tmp_path / "cuda-graph"), weights(tmp_path / "no-cuda-graph"))


# For each option of the command line: a value that must change the weights or, if it cannot, the recipe.
CHANGES = {
    "--tokens": "character",
    "--vocabulary-size": 10,
    "--batch-size": 5,
    "--window": 9,
    "--hidden-size": 8,
    "--embedding-size": 8,
    "--num-layers": 2,
    "--dropout": 0.4,
    "--epochs": 2,
    "--optimizer": "sgd",
    "--learning-rate": 0.01,
    "--schedule": "constant",
    "--clip": 0.001,
    "--clip-value": 0.0001,
    "--average": "ema",
    "--precision": "bfloat16",
    "--seed": 3,
}


@pytest.fixture(scope="module")
def plain():
    return {}


# These reach the model and the training in the same way as the others. The effects of options of training are tested in
# tests/training/test_options.py.
OF_SIZES = {"--hidden-size", "--embedding-size", "--num-layers"}
OF_TRAINING = {"--epochs", "--optimizer", "--schedule", "--clip", "--clip-value", "--average", "--precision"}


@pytest.mark.usefixtures("training_alone")
@pytest.mark.parametrize(
    "option",
    [
        *(option for option in CHANGES if option not in OF_TRAINING | OF_SIZES),
        "--no-tied",
        *exhaustive(*sorted(OF_TRAINING | OF_SIZES)),
    ],
)
def test_the_option_changes_the_model(gatewise, small, option, plain):
    short = [*small, "--epochs", 1]
    if not plain:
        assert gatewise("train", "lm", *short, "--no-tied", "--output", "plain").status == 0
        plain.update(weights("plain"))
    words = [option, CHANGES[option]] if option in CHANGES else []
    tied = ["--tied"] if option == "--no-tied" else ["--no-tied"]
    answer = gatewise("train", "lm", *short, *tied, *words, "--output", "run")
    assert answer.status == 0, answer.err
    assert not same(plain, weights("run"))


def test_three_files_are_read_as_they_are(gatewise, small, text, tmp_path):
    for split in ("train", "valid", "test"):
        shutil.copy(text, tmp_path / f"{split}.txt")
    files = [word for split in ("train", "valid", "test") for word in (f"--{split}", f"{split}.txt")]
    without = small[: small.index("--text")] + small[small.index("--text") + 2 :]
    answer = gatewise("train", "lm", *without, *files, "--output", "run")
    words = len(text.read_text().split()) + len(text.read_text().splitlines())
    assert f"train {words:,}, valid {words:,}, test {words:,}" in answer.out
    answer = gatewise("train", "lm", *without, "--train", "train.txt", "--output", "other")
    assert answer.refused
    assert "`--train`, `--valid`, `--test` must be three files, got only `--train`" in answer.err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("lm", "--text", "a", "--train", "b", "--valid", "c"), "`--text` and `--train`, `--valid`"),
        (("lm", "--text", "a", "--set", "text.test=b"), "`--text` and `--test`"),
        (("classify", "--data", "a", "--train", "b"), "`--data` and `--train`"),
        (("nmt", "--data", "a", "--train-source", "b"), "`--data` and `--train-source`"),
    ],
)
def test_data_that_are_named_in_two_ways_are_refused(gatewise, words, names):
    answer = gatewise("train", *words)
    assert answer.refused
    assert f"{names} exclude each other. Name the data in one of these ways." in answer.err


def test_one_file_replaces_the_three_of_a_recipe_and_the_reverse(gatewise, small, text, tmp_path):
    other = [word for split in ("train", "valid", "test") for word in ("--set", f"{split}={text}")]
    (tmp_path / "three.toml").write_text('[text]\ntrain = "a"\nvalid = "b"\ntest = "c"\n')
    (tmp_path / "one.toml").write_text('[text]\nsource = "a"\n')
    without = small[: small.index("--text")] + small[small.index("--text") + 2 :]
    for recipe, words in (("three", ["--text", text]), ("three", ["--set", f"source={text}"]), ("one", other)):
        answer = gatewise("train", "lm", "--recipe", f"{recipe}.toml", *without, *words, "--epochs", 1)
        assert answer.status == 0, answer.err
        assert "cats.txt" in answer.out


def test_a_recipe_can_be_overridden(gatewise, small, tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\n[model]\nhidden_size = 4\n[training]\nepochs = 1\n')
    answer = gatewise(
        "train", "lm", "--recipe", "mine.toml", *small, "--set", "model.hidden_size=8", "--set", "tied=false"
    )
    assert answer.status == 0, answer.err
    recipe = tomllib.loads((tmp_path / "runs" / "mine" / "recipe.toml").read_text())
    assert recipe["model"]["hidden_size"] == 8  # --set takes precedence over the flag, the flag over the file
    assert recipe["training"]["epochs"] == 2


def test_a_model_worse_than_token_frequencies_is_said_to_be_and_why(gatewise, small):
    answer = gatewise("train", "lm", *small, "--epochs", 1, "--learning-rate", 1e-9, "--output", "run")
    assert re.search(r"^unigram  perplexity [\d.]+; the model's is 1\.[1-9] times higher$", answer.out, re.MULTILINE)
    words = " ".join(answer.out.split())
    assert "steps 20 in 1 epoch" in words
    expected = "the model is no better than the frequencies of tokens: 20 steps are too few to learn. Raise `--epochs`"
    assert f"note {expected}" in words
    words = [*small, "--epochs", 1, "--learning-rate", 1e-9, "--set", "warmup_steps=20"]
    answer = gatewise("train", "lm", *words, "--output", "slow")
    assert "all 20 steps were within the 20 of `--set training.warmup_steps`." in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("perplexity", "said"),
    [(50.0, "2.0 times lower"), (96.0, "about the same"), (104.0, "about the same"), (200.0, "2.0 times higher")],
)
def test_a_perplexity_is_lower_than_higher_than_or_about_the_same_as_another(perplexity, said):
    assert compared(perplexity, 100.0) == said


def test_an_evaluation_window_may_be_longer_than_the_text(gatewise, small):
    perplexities = []
    for window in (10, 100_000):
        words = ("--epochs", 1, "--set", f"evaluation_window={window}", "--output", f"run{window}")
        answer = gatewise("train", "lm", *small, *words)
        assert answer.status == 0, answer.err
        perplexities.append(json.loads(RunFolder(f"run{window}").result.read_text())["test_perplexity"])
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-5)


def test_a_short_evaluation_text_hears_which_option_can_help(gatewise, small):
    answer = gatewise("train", "lm", *small, "--set", "evaluation_batch_size=1000", "--output", "run")
    assert answer.status == 1
    said = " ".join(answer.err.split())
    assert "1000 columns of 1 step need at least 2,000. Give a longer text, or lower `--set text.evaluation_b" in said
    assert "--window" not in said


def test_a_tied_model_may_have_any_hidden_size(gatewise, small):
    answer = gatewise("train", "lm", *small, "--set", "model.hidden_size=11", "--output", "run")
    assert answer.status == 0, answer.err
    assert "1 x 11 LSTM, tied softmax after a projection to 16" in answer.out
    assert gatewise("generate", "--checkpoint", "run", "--length", 3).status == 0


# The options of this recipe are resumed in tests/training/test_resumption.py.
@pytest.mark.exhaustive
def test_the_recipe_of_the_awd_lstm_trains_at_any_size(gatewise, small, text):
    files = [word for split in ("train", "valid", "test") for word in (f"--{split}", text)]
    sizes = {"model.hidden_size": 20, "model.last_hidden_size": 12, "model.embedding_size": 12, "model.num_layers": 3}
    options = {
        "evaluation_window": 40,
        "jitter": 2.5,
        "rate_tokens": 40,
        "warmup_steps": 0,
        "checkpoint_evaluations": 1,
    }
    words = [word for name, value in (sizes | options).items() for word in ("--set", f"{name}={value}")]
    words += ["--recipe", "wikitext2-awd-lstm", *files, "--batch-size", 4, "--window", 10]
    words += ["--precision", "float32", "--epochs", 3]
    answer = gatewise("train", "lm", *words, "--output", "run")
    assert answer.status == 0, answer.err
    assert "20-20-12 LSTM, tied softmax, " in answer.out
    evaluations = json.loads(RunFolder("run").result.read_text())["evaluations"]
    assert evaluations[-1]["valid_perplexity"] < evaluations[0]["valid_perplexity"]
    assert gatewise("generate", "--checkpoint", "run", "--length", 3).status == 0
    other = gatewise("train", "lm", *words, "--set", "evaluation_window=0", "--output", "other")
    assert other.status == 0, other.err
    found = [each["valid_perplexity"] for each in json.loads(RunFolder("other").result.read_text())["evaluations"]]
    assert found == pytest.approx([each["valid_perplexity"] for each in evaluations], rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.word_dropout=1", "`--set model.word_dropout` must be a probability in [0, 1), got 1"),
        ("model.weight_dropout=-1", "`--set model.weight_dropout` must be a probability in [0, 1), got -1"),
        ("model.last_hidden_size=8", "`--set model.last_hidden_size` must be 0 for one layer, got 8"),
        ("text.jitter=9", "`--set text.jitter` must be from 0 to"),
        ("training.beta2=1", "`--set training.beta2` must be in [0, 1), got 1"),
    ],
)
def test_options_of_the_awd_lstm_that_make_no_sense_are_refused_by_name(gatewise, small, setting, message):
    answer = gatewise("train", "lm", *small, "--set", setting, "--output", "run")
    assert answer.refused
    assert message in " ".join(answer.err.split())
    assert not RunFolder("run").path.exists()


def test_what_was_expected_is_compared(gatewise, small):
    for limit, verdict in ((1e9, "reached"), (1.001, "missed")):
        answer = gatewise(
            "train", "lm", *small, "--overwrite", "--output", "run", "--set", f"expect.test_perplexity={limit}"
        )
        assert f"test perplexity at most {limit:g}: {verdict}" in answer.out


@pytest.mark.parametrize(
    ("words", "compared"),
    [
        ([], True),
        (["--seed", 3, "--kernel", "eager", "--set", "sample.length=5"], True),
        (["--epochs", 1], False),
        (["--set", "training.epochs=1", "--set", "expect.valid_perplexity=1e9"], False),
    ],
)
def test_expectations_of_a_recipe_hold_for_its_own_values(gatewise, trained, text, tmp_path, words, compared):
    recipe = (tmp_path / "run" / "recipe.toml").read_text().replace("test_perplexity = 0.0", "test_perplexity = 1e9")
    (tmp_path / "mine.toml").write_text(recipe)
    answer = gatewise("train", "lm", "--recipe", "mine.toml", "--text", text, "--output", "new", *words)
    assert answer.status == 0, answer.err
    assert ("test perplexity at most 1e+09" in answer.out) == compared
    assert ("valid perplexity at most 1e+09: reached" in answer.out) == ("expect.valid_perplexity=1e9" in words)
    if compared:
        longer = gatewise("train", "lm", "--output", "new", "--resume", "--epochs", 3)
        assert longer.status == 0, longer.err
        assert "test perplexity at most" not in longer.out


def test_data_of_the_same_name_elsewhere_is_the_data_of_the_recipe():
    recipe = Recipe(text=TextOptions(train="a/train.txt"), expect=Expectation(test_perplexity=80.0))
    for path, kept in (("/b/train.txt", True), ("/b/book.txt", False)):
        after = dataclasses.replace(recipe, text=TextOptions(train=path))
        assert (with_valid_expectations(recipe, after, "text", ("train",)) == after) == kept


def test_a_run_is_neither_overwritten_nor_mixed_up(gatewise, small):
    assert gatewise("train", "lm", *small, "--output", "run").status == 0
    before = weights("run")
    answer = gatewise("train", "lm", *small, "--seed", 9, "--output", "run")
    assert answer.status == 1
    assert "run already holds a run. Resume it by `--resume`" in answer.err
    answer = gatewise("train", "lm", *small, "--seed", 9, "--output", "run", "--resume")
    assert answer.status == 1
    assert "started with another `--seed`. A run can be resumed with other `--epochs`" in " ".join(answer.err.split())
    assert same(before, weights("run"))
    assert gatewise("train", "lm", *small, "--seed", 9, "--output", "run", "--overwrite").status == 0
    assert not same(before, weights("run"))


def test_there_must_be_something_to_resume(gatewise, small):
    answer = gatewise("train", "lm", "--output", "run", "--resume")
    assert answer.status == 1
    assert "there is no run in run to resume" in answer.err
    assert (
        gatewise("train", "lm", *small, "--output", "run", "--resume").status == 0
    )  # these options specify a new run completely
    answer = gatewise("train", "lm", "--output", "run", "--resume", "--overwrite")
    assert "exclude each other" in answer.err


@pytest.mark.parametrize("words", [["--epochs", 3], pytest.param(["--set", "epochs=3"], marks=pytest.mark.exhaustive)])
def test_a_run_is_resumed_to_more_epochs(gatewise, small, words):
    options = [*small, "--schedule", "constant"]
    assert gatewise("train", "lm", *options, "--epochs", 3, "--output", "whole").status == 0
    assert gatewise("train", "lm", *options, "--epochs", 1, "--output", "parts").status == 0
    answer = gatewise("train", "lm", "--output", "parts", "--resume", *words)
    assert answer.status == 0, answer.err
    assert RunFolder("whole").model.read_bytes() == RunFolder("parts").model.read_bytes()
    assert RunFolder("whole").recipe.read_bytes() == RunFolder("parts").recipe.read_bytes()
    answer = gatewise("train", "lm", "--output", "parts", "--resume", "--epochs", 2)
    assert answer.refused
    assert "`--epochs` must be at least 3 to resume the run in parts, which has begun its epoch 3" in answer.err
    assert RunFolder("whole").recipe.read_bytes() == RunFolder("parts").recipe.read_bytes()


def test_a_recipe_that_a_run_is_resumed_with_is_compared_with_that_of_the_run(gatewise, small, tmp_path):
    assert gatewise("train", "lm", *small, "--epochs", 1, "--output", "run").status == 0
    shutil.copy("run/recipe.toml", "mine.toml")
    words = ["--recipe", "mine.toml", "--output", "run", "--resume"]
    assert "resumed after" in gatewise("train", "lm", *words, "--epochs", 2).out
    answer = gatewise("train", "lm", *words, "--set", "evaluation_batch_size=3", "--window", 9)
    assert "started with another `--window`, `--set text.evaluation_batch_size`." in " ".join(answer.err.split())


def test_ctrl_c_says_how_to_go_on(gatewise, small, monkeypatch):
    assert gatewise("train", "lm", *small, "--output", "whole").status == 0
    original = TokenStream.windows

    def windows(self, epoch=0, start=0):
        for index, window in enumerate(original(self, epoch, start)):
            if epoch == 1 and index == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield window

    with monkeypatch.context() as patch:
        patch.setattr(TokenStream, "windows", windows)
        answer = gatewise("train", "lm", *small, "--output", "parts")
    assert answer.status == 130
    assert "everything is saved. Resume with:\n  gatewise train lm --output parts --resume" in answer.out
    answer = gatewise("train", "lm", "--output", "parts", "--resume")
    assert answer.status == 0
    assert "resumed after" in answer.out
    assert RunFolder("whole").model.read_bytes() == RunFolder("parts").model.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "absent.txt"], "there is no text file"),
        (["--window", 5000], "the training text has"),
        (["--kernel", "cudnn"], "the kernel 'cudnn' cannot train this model"),
        (["--kernel", "fastest"], "'eager'"),
        (["--output", "/proc/run"], "`--output` must be a folder that can be written"),
        (["--output", "cats.txt/run"], "`--output` must be a folder that can be written"),
        (["--dropout", 1.5], "must be a probability in [0, 1)"),
        (["--device", "tpu"], "`--device` must be cpu, cuda or cuda:N, got 'tpu'"),
        (["--set", "sample.temperature=-1"], "`--set sample.temperature` must be 0 or more"),
        (["--set", "sample.prompt=' '"], "`--set sample.prompt` must be a text of at least one token, got ' '."),
        (["--tokens", "syllable"], "`--tokens` must be one of"),
        (["--batch-size", 0], "`--batch-size` must be a positive integer"),
    ],
)
def test_bad_input_is_an_error_before_training(gatewise, small, words, message, tmp_path):
    answer = gatewise("train", "lm", *small, "--output", "run", *words)
    assert answer.refused
    assert answer.err.startswith("error: ")
    assert message in answer.err
    assert "valid ppl" not in answer.out
    assert not list((tmp_path / "run").glob("*")) if (tmp_path / "run").exists() else True


def test_a_full_disk_is_an_error_before_training(gatewise, small, monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    answer = gatewise("train", "lm", *small, "--output", "run")
    assert answer.refused
    assert "must be on a disk with" in answer.err
    assert "valid ppl" not in answer.out


# In `make test` processes are killed that call the package: tests/training/test_resumption.py.
@pytest.mark.exhaustive
def test_kill_nine_and_resume_end_in_the_same_bits(gatewise, small, tmp_path):
    options = ["train", "lm", *small, "--set", "checkpoint_steps=1", "--epochs", 4]
    assert gatewise(*options, "--output", "whole").status == 0
    program = Program([*options, "--output", "parts"], tmp_path)
    while not RunFolder(tmp_path / "parts").model.exists() and program.status is None:
        time.sleep(0.005)
    program.process.kill()
    assert program.ended().status == -signal.SIGKILL
    assert gatewise("train", "lm", "--output", "parts", "--resume").status == 0
    assert RunFolder(tmp_path / "whole").model.read_bytes() == RunFolder(tmp_path / "parts").model.read_bytes()


def test_two_processes_have_the_losses_of_one(gatewise, small, tmp_path):
    options = ["train", "lm", *small, "--dropout", 0]
    assert gatewise(*options, "--output", "1").status == 0
    first, second = together([*options, "--output", "2"], tmp_path)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert (first.out.count("valid ppl"), second.out) == (1, ""), "only the first process reports"
    results = [json.loads(RunFolder(tmp_path / name).result.read_text()) for name in ("1", "2")]
    for name in ("valid_perplexity", "test_perplexity"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-4)


def torchrun(words, folder):
    """Start torchrun's command, which starts `python -m gatewise`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (folder / "printed.command").open("w") as printed:
        options = {"cwd": folder, "env": environment, "stdout": printed, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*launcher, "-m", "gatewise", *words], **options)


def forked(words, folder):
    options = ["--standalone", "--nproc-per-node", 2]
    return Agent(options, folder / "printed.agent", program_of_torchrun, [*words], folder)


# Torchrun's command and the processes that it starts import PyTorch for most of the time of their test.
@pytest.mark.parametrize(
    "start",
    [forked, pytest.param(torchrun, marks=[pytest.mark.slow, pytest.mark.exhaustive])],
    ids=lambda own: own.__name__,
)
def test_ctrl_c_on_torchrun_saves_and_says_how_to_go_on(small, tmp_path, start):
    process = start(["train", "lm", *map(str, small), "--output", "run", "--epochs", "1000"], tmp_path)
    while not RunFolder(tmp_path / "run").model.exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.wait(60)
    out = "".join(path.read_text("utf-8") for path in (*tmp_path.glob("printed.*"), *tmp_path.glob("errors.*")))
    assert "everything is saved" in out, out
    resume = "torchrun --nproc-per-node 2 -m gatewise train lm --output run --resume"
    assert resume in out
    step = read_tensors(RunFolder(tmp_path / "run").checkpoint, CHECKPOINT)[1]["step"]
    assert f"Stopped after {step:,} steps" in out


def ends_the_second_process_once():
    """End the second process in the middle of the second epoch, unless it has been started again."""
    original = TokenStream.windows

    def windows(self, epoch=0, start=0):
        for index, window in enumerate(original(self, epoch, start)):
            if (
                epoch == 1
                and index == 3
                and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0")
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            yield window

    TokenStream.windows = windows


def test_processes_that_torchrun_starts_again_go_on_from_the_checkpoint(small, tmp_path):
    words = ["train", "lm", *small, "--set", "checkpoint_steps=1"]
    first, second = together([*words, "--output", "whole"], tmp_path)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    given = [*words, "--output", "run"], tmp_path, ends_the_second_process_once
    under_torchrun(program_of_torchrun, *given, restarts=1)
    assert "resumed after" in (tmp_path / "printed.0.1").read_text("utf-8")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "`--output` must be given with `torchrun --max-restarts`"),
        (["--output", "run", "--overwrite"], "`--overwrite` and `torchrun --max-restarts` exclude each other"),
    ],
)
def test_a_run_that_torchrun_may_start_again_names_its_folder(gatewise, small, tmp_path, monkeypatch, given, message):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    answer = gatewise("train", "lm", *small, *given)
    assert answer.refused
    assert message in " ".join(answer.err.split())
    assert not list(tmp_path.glob("run*"))

"""`gatewise train classify`: its output, files, errors, and resumed runs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
import tomllib

import numpy as np
import pytest
import torch

from gatewise.data import SequenceBatches
from gatewise.training import RunFolder, TrainingOptions, read_tensors
from gatewise.training.loop import CHECKPOINT, MODEL
from tests.programs import Program, together


def weights(folder):
    return read_tensors(RunFolder(folder).model, MODEL)[0]


def history(folder):
    return read_tensors(RunFolder(folder).checkpoint, CHECKPOINT)[1]["history"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def waves(path, count=120, seed=0, kinds=("slow", "fast", "flat"), first=0):
    """Write waves of some classes and of different lengths, one row per step; `level` is a number to predict."""
    random = np.random.default_rng(seed)
    lines = ["sequence,time,x,noise,label,parity,level"]
    for number in range(first, first + count):
        kind = number % len(kinds)
        length, phase, level = random.integers(4, 14), random.uniform(0, 6), random.uniform(-2, 2)
        facts = f"{kinds[kind]},{'odd' if number % 2 else 'even'},{100 + 30 * level:.6f}"
        speed = {"slow": 0.4, "fast": 1.6}.get(kinds[kind], 0.0)
        for step in range(length):
            x = level + np.sin(phase + speed * step)
            lines.append(f"s{number},{step},{x:.6f},{random.normal():.6f},{facts}")
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture
def table(tmp_path):
    return waves(tmp_path / "waves.csv")


@pytest.fixture
def small(table):
    """The options of a run that takes a second."""
    sizes = {"hidden-size": 8, "num-layers": 2, "batch-size": 8, "epochs": 3, "learning-rate": 0.02}
    words = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    return ["--data", table, "--feature", "x", "--feature", "noise", *words]


def test_a_run_reports_and_leaves_everything(gatewise, drawn, small, tmp_path):
    answer = gatewise("train", "classify", *small, "--output", "run")
    assert answer.status == 0, answer.err
    for word in (
        *("waves.csv: train 96, valid 12, test 12", "steps of 2 features; predicts one of 3 classes"),
        *("2 x 8 bidirectional LSTM, mean over time", "chosen", "aten", "valid loss", "accuracy", "sequences/s"),
        *("always the most frequent class", "precision", "recall", "F1", "mean over classes", "gatewise evaluate"),
    ):
        assert word in answer.out
    # Paths in the test's folder are longer than a line of the terminal.
    assert max(len(line) for line in answer.out.splitlines() if "waves.csv" not in line) <= 80
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {
        *("recipe.toml", "checkpoint.safetensors", "model.safetensors"),
        *("result.json", "curves.png", "confusion.png", "tensorboard", "gatewise-run.json"),
    }
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    counts = np.array(result["test_confusion"])
    assert counts.sum() == 12
    assert result["test_accuracy"] == pytest.approx(np.diag(counts).sum() / 12)
    assert set(result["test_classes"]) == {"slow", "fast", "flat"}
    assert f"test     accuracy {result['test_accuracy']:.4f}" in answer.out
    assert [set(entry["scores"]) for entry in history("run")] == [{"accuracy"}] * 3
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert {"epoch/train_loss", "epoch/valid_loss", "epoch/valid_accuracy"} <= set(events.Tags()["scalars"])
    assert "gradients/lstm.weight_hh_l1_reverse" in events.Tags()["histograms"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "accuracy"), [(["--epochs", 2], 0.5), pytest.param([], 0.95, marks=pytest.mark.exhaustive)], ids=str
)
def test_the_digits_are_learned_without_naming_data(gatewise, words, accuracy):
    pytest.importorskip("sklearn")
    answer = gatewise("train", "classify", "--output", "run", *words)
    assert answer.status == 0, answer.err
    assert "handwritten digits" in answer.out
    result = json.loads(RunFolder("run").result.read_text())
    assert result["test_accuracy"] > accuracy


def test_a_number_is_predicted(gatewise, small):
    words = ["--task", "regression", "--label-column", "level", "--epochs", 12]
    answer = gatewise("train", "classify", *small, *words, "--output", "run", "--seed", 1)
    assert answer.status == 0, answer.err
    assert "predicts a number" in answer.out
    result = json.loads(RunFolder("run").result.read_text())
    assert result["test_r2"] > 0.7
    assert result["test_mae"] < 30
    assert f"MSE {result['test_mse']:.6g}, MAE {result['test_mae']:.6g}, R2 {result['test_r2']:.4f}" in answer.out
    assert {"R2"} == set(history("run")[0]["scores"])
    assert result["test_loss"] < 0.3  # in units of the training numbers, whatever these are


# For each option of the command line: a value that must change the weights.
CHANGES = {
    "--time-column": "",
    "--label-column": "parity",
    "--batch-size": 5,
    "--hidden-size": 4,
    "--num-layers": 1,
    "--pooling": "max",
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
SWITCHES = ("--no-bidirectional", "--no-standardize")


@pytest.fixture(scope="module")
def plain():
    return {}


# Options of training are those of `gatewise train lm`, and those of sizes reach the model with the others.
OF_TRAINING = {field.name for field in dataclasses.fields(TrainingOptions)} | {"hidden_size", "num_layers"}


@pytest.mark.usefixtures("training_alone")
@pytest.mark.parametrize(
    "option",
    [
        pytest.param(option, marks=pytest.mark.exhaustive if option[2:].replace("-", "_") in OF_TRAINING else ())
        for option in (*CHANGES, *SWITCHES)
    ],
)
def test_the_option_changes_the_model(gatewise, small, option, plain, table):
    waves(table, count=40)
    head, *rows = table.read_text().splitlines()
    table.write_text("\n".join([head, *reversed(rows)]) + "\n")  # so that the rows must be sorted by time
    short = [*small, "--epochs", 1]
    if not plain:
        assert gatewise("train", "classify", *short, "--output", "plain").status == 0
        plain.update(weights("plain"))
    words = [option, CHANGES[option]] if option in CHANGES else [option]
    answer = gatewise("train", "classify", *short, *words, "--output", "run")
    assert answer.status == 0, answer.err
    assert not same(plain, weights("run"))


def test_the_column_of_sequences_can_be_named(gatewise, small):
    words = ["--sequence-column", "noise", "--time-column", "", "--feature", "level"]
    answer = gatewise("train", "classify", *small, *words, "--epochs", 1, "--output", "run")
    assert answer.status == 0, answer.err
    assert "1 steps of 3 features" in answer.out


def test_columns_can_be_chosen_and_gaps_allowed(gatewise, small, table):
    lines = table.read_text().splitlines()
    del lines[3]
    table.write_text("\n".join(lines) + "\n")
    answer = gatewise("train", "classify", *small, "--output", "run")
    assert answer.status == 1
    assert "waves.csv, row 4: the sequence 's0' goes from time 1 to 3" in answer.err
    answer = gatewise("train", "classify", *small, "--allow-gaps", "--output", "run")
    assert answer.status == 0, answer.err
    assert read_tensors(RunFolder("run").model, MODEL)[1]["features"] == ["x", "noise"]


def test_training_stops_early(gatewise, small):
    words = ["--epochs", 50, "--patience", 2, "--learning-rate", 1.0, "--optimizer", "sgd"]
    answer = gatewise("train", "classify", *small, *words, "--output", "run")
    assert answer.status == 0, answer.err
    assert "stopped  no improvement in 2 evaluations" in answer.out
    assert len(history("run")) < 50
    assert not any(entry["best"] for entry in history("run")[-2:])


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_model_that_learned_nothing_is_said_to_have_and_why(gatewise, small, task):
    words = ["--task", task, "--label-column", {"classification": "label", "regression": "level"}[task]]
    answer = gatewise("train", "classify", *small, *words, "--epochs", 1, "--learning-rate", 1e-9, "--output", "run")
    assert answer.status == 0, answer.err
    better = {
        "classification": "the accuracy is not above that of",
        "regression": "the model is no better than the mean",
    }
    said = " ".join(answer.out.split())
    assert f"note {better[task]}" in said
    assert "steps are too few to learn. Raise `--epochs`" in said


def test_three_files_are_read_as_they_are(gatewise, small, tmp_path):
    for number, split in enumerate(("train", "valid", "test")):
        waves(tmp_path / f"{split}.csv", count=30, seed=number)
    files = [word for split in ("train", "valid", "test") for word in (f"--{split}", f"{split}.csv")]
    words = small[2:]  # without the other data
    answer = gatewise("train", "classify", *words, *files, "--output", "run")
    assert answer.status == 0, answer.err
    assert "train 30, valid 30, test 30" in answer.out
    waves(tmp_path / "test.csv", count=30, kinds=("slow", "wild"))
    answer = gatewise("train", "classify", *words, *files, "--output", "other")
    assert answer.status == 1
    assert "test.csv, row " in answer.err
    assert "the label 'wild' was not seen in training; known are fast, flat, slow." in answer.err
    assert not (tmp_path / "other" / "recipe.toml").exists()
    answer = gatewise("train", "classify", *words, "--train", "train.csv", "--output", "other")
    assert "`--train`, `--valid`, `--test` must be three files, got only `--train`" in answer.err


# `gatewise train lm` is tested in the same way: test_train_lm.py.
@pytest.mark.exhaustive
def test_a_recipe_can_be_overridden(gatewise, small, tmp_path):
    text = 'name = "mine"\n[data]\nfeatures = ["x"]\n[model]\nhidden_size = 4\n[training]\nepochs = 1\n'
    (tmp_path / "mine.toml").write_text(text)
    answer = gatewise(
        "train",
        "classify",
        "--recipe",
        "mine.toml",
        *small,
        "--set",
        "model.hidden_size=6",
        "--set",
        'features=["noise"]',
    )
    assert answer.status == 0, answer.err
    recipe = tomllib.loads((tmp_path / "runs" / "mine" / "recipe.toml").read_text())
    assert recipe["model"]["hidden_size"] == 6  # --set takes precedence over the flag, the flag over the file
    assert recipe["training"]["epochs"] == 3
    assert recipe["data"]["features"] == ["noise"]


def test_brackets_in_names_are_no_markup(gatewise, small, tmp_path):
    waves(tmp_path / "[red]waves.csv", kinds=("[/bold]", "[red]", "plain"))
    words = ["--data", "[red]waves.csv", "--output", "[red]run", "--epochs", 1]
    answer = gatewise("train", "classify", *small, *words)
    assert answer.status == 0, answer.err
    for name in ("[/bold]", "[red]", "[red]waves.csv", "[red]run"):
        assert name in answer.out
    answer = gatewise("evaluate", "--checkpoint", "[red]run", "--predictions", "[b].csv")
    assert answer.status == 0, answer.err
    assert "[red]" in answer.out


# `gatewise train lm` is tested in the same way: test_train_lm.py.
@pytest.mark.exhaustive
def test_the_graph_of_a_step_can_be_switched_off(gatewise, small, tmp_path):
    assert gatewise("train", "classify", *small, "--no-cuda-graph", "--epochs", 1, "--output", "run").status == 0
    assert tomllib.loads((tmp_path / "run" / "recipe.toml").read_text())["training"]["cuda_graph"] is False


# `gatewise train lm` is tested in the same way: test_train_lm.py.
@pytest.mark.exhaustive
def test_what_was_expected_is_compared(gatewise, small):
    for limit, verdict in ((0.01, "reached"), (1.01, "missed")):
        setting = f"expect.test_accuracy={limit}"
        answer = gatewise(
            "train", "classify", *small, "--epochs", 1, "--overwrite", "--output", "run", "--set", setting
        )
        assert f"test accuracy at least {limit:g}: {verdict}" in answer.out


# `gatewise train lm` is tested in the same way: test_train_lm.py.
@pytest.mark.exhaustive
def test_a_run_is_neither_overwritten_nor_mixed_up(gatewise, small, table):
    small = [*small, "--epochs", 1]
    assert gatewise("train", "classify", *small, "--output", "run").status == 0
    before = weights("run")
    answer = gatewise("train", "classify", *small, "--seed", 9, "--output", "run")
    assert "run already holds a run. Resume it by `--resume`" in answer.err
    waves(table, seed=5)
    answer = gatewise("train", "classify", "--output", "run", "--resume")
    assert answer.status == 1
    assert "error: run/checkpoint.safetensors was made with another training data" in answer.err
    assert same(before, weights("run"))
    assert gatewise("train", "classify", *small, "--output", "run", "--overwrite").status == 0
    assert not same(before, weights("run"))


def test_ctrl_c_says_how_to_go_on(gatewise, small, monkeypatch):
    assert gatewise("train", "classify", *small, "--output", "whole").status == 0
    original = SequenceBatches.windows

    def windows(self, epoch=0, start=0):
        for index, batch in enumerate(original(self, epoch, start)):
            if epoch == 1 and index == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(SequenceBatches, "windows", windows)
        answer = gatewise("train", "classify", *small, "--output", "parts")
    assert answer.status == 130
    assert "everything is saved. Resume with:\n  gatewise train classify --output parts --resume" in answer.out
    answer = gatewise("train", "classify", "--output", "parts", "--resume")
    assert answer.status == 0, answer.err
    assert "resumed after" in answer.out
    assert RunFolder("whole").model.read_bytes() == RunFolder("parts").model.read_bytes()
    assert timeless(history("whole")) == timeless(history("parts"))


def timeless(entries):
    return [{name: entry[name] for name in entry.keys() - {"seconds", "tokens_per_second"}} for entry in entries]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "absent.csv"], "does not exist"),
        (["--data", "waves.txt"], "must end in one of .csv, .parquet, .npz"),
        (["--feature", "z"], "has no column 'z'; its columns are 'sequence', 'time', 'x', 'noise', 'label'"),
        (["--label-column", "sort"], "has no column 'sort'"),
        (["--label-column", "x"], "`--feature` names the column 'x' of"),
        (["--label-column", "time"], "the sequence 's0' has the label"),
        (["--label-column", ""], "`--label-column` must be the name of a column"),
        (["--task", "regression"], "row 2: 'label' is 'slow', not a number"),
        (["--task", "ranking"], "`--task` must be one of classification, regression, got 'ranking'"),
        (["--data", "synthetic", "--task", "regression"], "`--task` must be classification for synthetic"),
        (["--pooling", "sum"], "`--pooling` must be one of mean, last, max"),
        (["--kernel", "cudnn"], "the kernel 'cudnn' cannot train this model"),
        (["--batch-size", 0], "`--batch-size` must be a positive integer"),
        (["--dropout", 1.5], "must be a probability in [0, 1)"),
        (["--clip-value", -1], "`--clip-value` must be 0 or more, got -1.0"),
        (["--set", "shares=[0.5, 0.5, 0.5]"], "three positive numbers that sum to 1"),
        (["--output", "/proc/run"], "`--output` must be a folder that can be written"),
        (["--set", "features=[1]"], "`data.features` must be a list of strings, got [1]"),
    ],
)
def test_bad_input_is_an_error_before_training(gatewise, small, words, message, tmp_path):
    answer = gatewise("train", "classify", *small, "--output", "run", *words)
    assert answer.refused
    assert answer.err.startswith("error: ")
    assert message in " ".join(answer.err.split())
    assert "valid loss" not in answer.out
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_the_digits_without_scikit_learn_say_what_to_install(gatewise, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    answer = gatewise("train", "classify", "--output", "run")
    assert answer.status == 1
    assert "the digits to learn from needs `scikit-learn`, which is not installed. Run: pip install" in answer.err


@pytest.mark.exhaustive  # test_train_lm.py kills a language model
def test_kill_nine_and_resume_end_in_the_same_bits(gatewise, small, tmp_path):
    options = ["train", "classify", *small, "--set", "checkpoint_steps=1", "--epochs", 6]
    assert gatewise(*options, "--output", "whole").status == 0
    program = Program([*options, "--output", "parts"], tmp_path)
    while not RunFolder(tmp_path / "parts").model.exists() and program.status is None:
        time.sleep(0.005)
    program.process.kill()
    assert program.ended().status == -signal.SIGKILL
    assert gatewise("train", "classify", "--output", "parts", "--resume").status == 0
    assert RunFolder(tmp_path / "whole").model.read_bytes() == RunFolder(tmp_path / "parts").model.read_bytes()


def test_two_processes_have_the_losses_and_scores_of_one(gatewise, small, tmp_path):
    options = ["train", "classify", *small, "--dropout", 0]
    assert gatewise(*options, "--output", "1").status == 0
    first, second = together([*options, "--output", "2"], tmp_path)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert (first.out.count("valid loss"), second.out) == (1, ""), "only the first process reports"
    one, two = (json.loads(RunFolder(tmp_path / name).result.read_text()) for name in ("1", "2"))
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-4)
    assert one["test_confusion"] == two["test_confusion"]
    for mine, theirs in zip(history(tmp_path / "1"), history(tmp_path / "2"), strict=True):
        assert mine["valid_loss"] == pytest.approx(theirs["valid_loss"], rel=1e-4)
        assert mine["scores"] == theirs["scores"]


def test_a_table_larger_than_a_pool_is_read_whole(gatewise, small, tmp_path):
    shutil.copy(waves(tmp_path / "many.csv", count=400), tmp_path / "copy.csv")
    answer = gatewise("train", "classify", *small, "--data", "copy.csv", "--epochs", 1, "--output", "run")
    assert answer.status == 0, answer.err
    assert "train 320, valid 40, test 40" in answer.out
    assert history("run")[0]["step"] == 40

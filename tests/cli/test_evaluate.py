"""`gatewise evaluate`: a saved classifier is scored as at the end of its training, and on other sequences."""

from __future__ import annotations

import csv
import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from gatewise.training import RunFolder, read_tensors
from gatewise.training.checkpoint import write_tensors
from gatewise.training.loop import MODEL
from gatewise.training.pictures import FILE_OF_PLOT

HEAD = "sequence,time,x,label,level\n"


def steps(path, count=60, seed=0, labels=("up", "down"), head=HEAD):
    """Write ramps up and down, of unequal length."""
    random = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        slope = 1 - 2 * (number % 2)
        level = random.uniform(-3, 3)
        for step in range(random.integers(3, 9)):
            x = level + slope * step + 0.1 * random.normal()
            lines.append(f"s{number},{step},{x:.6f},{labels[number % 2]},{level:.6f}\n")
    path.write_text(head + "".join(lines), "utf-8")
    return path


SIZES = ["--feature", "x", "--hidden-size", 8, "--epochs", 8, "--learning-rate", 0.03]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def run(gatewise, drawn, finished, tmp_path):
    """A finished run, trained once."""
    if not (finished / "run").exists():
        data = steps(finished / "steps.csv")
        answer = gatewise("train", "classify", "--data", data, *SIZES, "--batch-size", 4, "--output", finished / "run")
        assert answer.status == 0, answer.err
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return RunFolder(tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "steps.csv", "--json", "steps.csv"], "`--json` must be a file of its own, got steps.csv"),
        (["--data", "steps.csv", "--predictions", "./steps.csv"], "That is the file of `--data`"),
        (["--plot", "run/model.safetensors"], "That is the file of `--checkpoint`"),
        (["--plot", "new", "--json", "new"], "That is the file of `--plot`, which is written as well"),
    ],
)
def test_what_is_read_is_not_overwritten(gatewise, run, words, message):
    files = run.model, run.path.parent / "steps.csv"
    before = [file.read_bytes() for file in files]
    answer = gatewise("evaluate", "--checkpoint", "run", *words)
    assert answer.refused
    assert message in answer.err
    assert [file.read_bytes() for file in files] == before
    assert not (run.path.parent / "new").exists()


def test_the_data_of_the_run_are_not_overwritten(gatewise, run):
    source = Path(tomllib.loads(run.recipe.read_text())["data"]["source"])
    before = source.read_bytes()
    answer = gatewise("evaluate", "--checkpoint", "run", "--json", source)
    assert answer.refused
    assert "That is the file of `data.source`" in answer.err
    assert source.read_bytes() == before


def test_a_device_is_written_to_and_stays_one(gatewise, run, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda self, target: pytest.fail(f"{target} would be replaced"))
    answer = gatewise("evaluate", "--checkpoint", "run", "--json", "/dev/null", "--plot", "/dev/null")
    assert answer.status == 0, answer.err
    assert Path("/dev/null").is_char_device()


def test_plots_are_in_the_formats_of_the_help(gatewise, run):
    for command in (["evaluate"], ["bench", "lm"]):
        assert FILE_OF_PLOT in " ".join(gatewise(*command, "--help").out.replace("│", " ").split())
    for suffix, magic in ((".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")):
        plot = run.path.parent / f"plot{suffix}"
        answer = gatewise("evaluate", "--checkpoint", "run", "--plot", plot)
        assert answer.status == 0, answer.err
        assert plot.read_bytes().startswith(magic)


def test_the_test_sequences_have_the_scores_of_the_training(gatewise, run):
    answer = gatewise("evaluate", "--checkpoint", "run", "--json", "scores.json", "--plot", "plot.png")
    assert answer.status == 0, answer.err
    result = json.loads(run.result.read_text())
    scores = json.loads((run.path.parent / "scores.json").read_text())
    assert {f"test_{name}": score for name, score in scores.items()} == {
        name: score for name, score in result.items() if name.startswith("test_") and name != "test_loss"
    }
    assert f"accuracy {result['test_accuracy']:.4f}" in answer.out
    assert "precision" in answer.out
    assert (run.path.parent / "plot.png").read_bytes() == run.confusion.read_bytes()


def test_other_sequences_are_answered_one_by_one(gatewise, run, tmp_path):
    steps(tmp_path / "new.csv", count=40, seed=7)
    words = ["--data", "new.csv", "--predictions", "answers.csv", "--json", "scores.json"]
    answer = gatewise("evaluate", "--checkpoint", "run/model.safetensors", *words)
    assert answer.status == 0, answer.err
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sequence"] for row in rows] == [f"s{number}" for number in range(40)]
    assert [row["label"] for row in rows] == ["up", "down"] * 20
    assert all(0.5 <= float(row["probability"]) <= 1 for row in rows)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert np.mean([row["label"] == row["answer"] for row in rows]) == scores["accuracy"]
    assert scores["accuracy"] > 0.9


def test_answers_need_no_labels(gatewise, run, tmp_path):
    steps(tmp_path / "new.csv", count=6)
    gatewise("evaluate", "--checkpoint", "run", "--data", "new.csv", "--predictions", "with.csv")
    text = (tmp_path / "new.csv").read_text()
    rows = [",".join(line.split(",")[:3]) for line in text.splitlines()]
    (tmp_path / "bare.csv").write_text("\n".join(rows) + "\n")
    words = ["--data", "bare.csv", "--predictions", "without.csv"]
    answer = gatewise("evaluate", "--checkpoint", "run", "--no-labels", *words)
    assert answer.status == 0, answer.err
    assert "accuracy" not in answer.out
    labelled = [line.split(",") for line in (tmp_path / "with.csv").read_text().splitlines()]
    bare = [line.split(",") for line in (tmp_path / "without.csv").read_text().splitlines()]
    assert [[each[0], *each[2:]] for each in labelled] == bare
    answer = gatewise("evaluate", "--checkpoint", "run", "--data", "bare.csv")
    assert "has no column 'label'" in answer.err


def test_numbers_are_scored_as_numbers(gatewise, drawn, tmp_path):
    steps(tmp_path / "steps.csv")
    words = ["--task", "regression", "--label-column", "level", "--output", "run"]
    assert gatewise("train", "classify", "--data", "steps.csv", *SIZES, *words).status == 0
    answer = gatewise("evaluate", "--checkpoint", "run", "--predictions", "answers.csv", "--plot", "plot.png")
    assert answer.status == 0, answer.err
    assert "MSE " in answer.out
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    errors = [float(row["answer"]) - float(row["label"]) for row in rows]
    result = json.loads(RunFolder("run").result.read_text())
    assert np.mean(np.square(errors)) == pytest.approx(result["test_mse"], rel=1e-5)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_named_kernel_computes_the_same(gatewise, run, tmp_path):
    for kernel in ("eager", "aten"):
        words = ["--kernel", kernel, "--predictions", f"{kernel}.csv"]
        assert gatewise("evaluate", "--checkpoint", "run", *words).status == 0
    tables = [(tmp_path / f"{kernel}.csv").read_text().splitlines()[1:] for kernel in ("eager", "aten")]
    for one, other in zip(*tables, strict=True):
        assert one.rpartition(",")[0] == other.rpartition(",")[0]
        assert float(one.rpartition(",")[2]) == pytest.approx(float(other.rpartition(",")[2]), abs=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "absent"], "absent does not exist. Give the folder of a run"),
        (["--checkpoint", "run", "--data", "absent.csv"], "does not exist. Check the path"),
        (
            ["--checkpoint", "run", "--data", "wild.csv"],
            "the label 'sideways' was not seen in training; known are down, up",
        ),
        (
            ["--checkpoint", "run", "--data", "other.csv"],
            "has no column 'x'; its columns are 'sequence', 'time', 'z', 'label', 'level'. Rename the right one in the "
            "file, or name it by `gatewise train classify --feature`.",
        ),
        (["--checkpoint", "run", "--data", "wide.npz"], "has 2 features per step, the training sequences have 1"),
        (["--checkpoint", "run", "--no-labels"], "`--no-labels` must be given with `--data` and `--predictions`"),
        (["--checkpoint", "run", "--plot", "absent/plot.png"], "`--plot` must be in a folder that exists"),
        (["--checkpoint", "run", "--plot", "plot.jpg"], f"`--plot` must be {FILE_OF_PLOT}, got plot.jpg. The suffix"),
        (["--checkpoint", "run", "--plot", "plot"], f"`--plot` must be {FILE_OF_PLOT}, got plot."),
        (["--checkpoint", "run", "--kernel", "cudnn"], "device is CPU"),
        (["--checkpoint", "run/checkpoint.safetensors"], "holds a checkpoint, not a model"),
        (["--checkpoint", "cut.safetensors"], "is truncated or not a safetensors file"),
    ],
)
def test_bad_input_is_an_error_and_writes_nothing(gatewise, run, words, message, tmp_path):
    steps(tmp_path / "wild.csv", labels=("up", "sideways"))
    steps(tmp_path / "other.csv", head=HEAD.replace("x", "z"))
    np.savez(tmp_path / "wide.npz", x=np.ones((2, 3, 2)), y=np.array(["up", "down"]))
    (tmp_path / "cut.safetensors").write_bytes(run.model.read_bytes()[:500])
    before = {path.name for path in tmp_path.iterdir()}
    answer = gatewise("evaluate", *words)
    assert answer.refused
    assert answer.err.startswith("error: ")
    assert message in " ".join(answer.err.split())
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_classifier_whose_metadata_are_damaged_is_named(gatewise, run):
    tensors, facts = read_tensors(run.model, MODEL)
    for change, message in (
        ({"classes": "updown"}, "is not a classifier: `classes` must be a list of strings, got 'updown'."),
        ({"features": [1]}, "is not a classifier: `features` must be a list of strings, got [1]."),
        ({"data": []}, "is not a classifier: "),
        ({"classifier": facts["classifier"] | {"hidden_size": -1}}, "is not a classifier: `hidden_size` must be"),
        ({"classifier": facts["classifier"] | {"hidden_size": 9}}, "is of another model: "),
    ):
        write_tensors(Path("wrong.safetensors"), tensors, MODEL, facts | change)
        answer = gatewise("evaluate", "--checkpoint", "wrong.safetensors")
        assert answer.status == 1
        assert f"error: wrong.safetensors {message}" in " ".join(answer.err.split())


def test_a_language_model_is_not_a_classifier(trained):
    answer = trained("evaluate", "--checkpoint", "run")
    assert "is not a classifier: it has no 'classifier'. Give a run folder of gatewise train classify." in " ".join(
        answer.err.split()
    )

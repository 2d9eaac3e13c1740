"""The command line, called in this process."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import shutil
import sys

import pytest

from tests.programs import begun_curves, begun_picture, begun_predictions, no_histogram

pytest.importorskip("typer")
pytest.importorskip("safetensors")


@dataclasses.dataclass
class Answer:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def refused(self) -> bool:
        """Whether the status is that of a refusal: 2 if the error begins with an option or an argument, otherwise 1.

        What a folder has on its disk is no error of the command line.
        """
        usage = re.match(r"error: (?:[^`]+: )?`(--|[A-Z]+`)(?!output` must be (a folder|on a disk))", self.err)
        return self.status == (2 if usage else 1)


@pytest.fixture
def gatewise(monkeypatch, capsys, tmp_path):
    """Call `gatewise` with the given words as on a terminal of 80 columns, in an empty folder."""
    from gatewise.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["gatewise", *map(str, words)])
        with pytest.raises(SystemExit) as leaving:
            main()
        captured = capsys.readouterr()
        return Answer(leaving.value.code or 0, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def command_named():
    """A function that makes a command of the program once."""
    from gatewise.cli import application

    return functools.cache(application.command_named)


@pytest.fixture(autouse=True)
def commands_are_made_once(monkeypatch, command_named):
    """Make commands once for all tests: that takes as long as many of them do."""
    monkeypatch.setattr("gatewise.cli.application.command_named", command_named)


@pytest.fixture
def drawn():
    """Draw plots and histograms completely."""


@pytest.fixture(autouse=True)
def pictures_are_not_drawn(request, monkeypatch):
    """Write only the beginning of plots, and no histograms, in tests that are not about them."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_histogram", no_histogram)
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", begun_picture)
        for name in ("language_model_run", "nmt_run", "classifier_run"):
            module = importlib.import_module(f"gatewise.cli.{name}")
            monkeypatch.setattr(module, "plot_curves", begun_curves)
        monkeypatch.setattr("gatewise.cli.classifier_run.plot_predictions", begun_predictions)


@pytest.fixture
def training_alone(monkeypatch):
    """Leave the program after the training, without scores of the test data, which take as long as a small training."""

    def leave(*given):
        raise SystemExit(0)

    for name in ("language_model_run.load_model", "nmt_run.load_translator", "classifier_run.load_classifier"):
        monkeypatch.setattr(f"gatewise.cli.{name}", leave)


@pytest.fixture
def text(tmp_path):
    """A text from which a small model learns a little."""
    path = tmp_path / "cats.txt"
    lines = [
        f"the {animal} sat on the {place} and ate {number} mice .\n"
        for animal in ("cat", "dog", "owl")
        for place in ("mat", "roof", "bed", "tree")
        for number in range(12)
    ]
    path.write_text("".join(lines[index * 37 % len(lines)] for index in range(len(lines))), "utf-8")
    return path


@pytest.fixture
def small(text):
    """The options of a run that takes a second."""
    sizes = {
        "embedding-size": 16,
        "hidden-size": 16,
        "num-layers": 1,
        "batch-size": 8,
        "window": 10,
        "epochs": 2,
        "learning-rate": 0.03,
    }
    words = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    return ["--text", text, "--tokens", "word", *words, "--set", "evaluation_batch_size=2", "--set", "sample.length=10"]


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """A folder for what is trained once."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def trained(gatewise, small, kept, tmp_path):
    """Call `gatewise` beside the folder `run` of a finished run with the options `small`, which is trained once."""
    if not (kept / "run").exists():
        assert gatewise("train", "lm", *small, "--output", "run").status == 0
        shutil.copytree(tmp_path / "run", kept / "run")
    else:
        shutil.copytree(kept / "run", tmp_path / "run")
    return gatewise

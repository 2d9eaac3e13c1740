from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gatewise.benchmarks import curve, rivals
from gatewise.benchmarks.cases import LanguageModelCase
from gatewise.benchmarks.language_model import Settings
from gatewise.benchmarks.precision import PRECISIONS
from gatewise.benchmarks.record import Record, Run
from gatewise.benchmarks.rivals import Way
from tests.programs import begun_picture

SMALL = LanguageModelCase("tiny", 16, dropout=0.5, clip_norm=5.0, initial_scale=0.3, time=5, batch=3)


@pytest.fixture(scope="session")
def known_curves():
    return {}


@pytest.fixture(autouse=True)
def nudged_once(monkeypatch, known_curves) -> None:
    """Train plain PyTorch from nudged weights once for all tests with the same training.

    Trainings are the same that have the same losses without a nudge, in every bit and at every step.
    """
    compute = curve.Rival.__init__

    def remembered(self, losses, *given, **options):
        if not losses.__module__.startswith("gatewise."):  # nothing is trained
            return compute(self, losses, *given, **options)
        own = losses(None)

        def known(nudge):
            if nudge is None:
                return own
            key = losses.__code__, own, nudge
            if key not in known_curves:
                known_curves[key] = losses(nudge)
            return known_curves[key]

        return compute(self, known, *given, **options)

    monkeypatch.setattr(curve.Rival, "__init__", remembered)


@pytest.fixture(autouse=True)
def few_dots(monkeypatch) -> None:
    """Write plots with few dots: those of a PNG file take longer than the lines of an SVG file."""
    if find_spec("matplotlib"):
        from matplotlib.figure import Figure

        save = Figure.savefig
        monkeypatch.setattr(Figure, "savefig", lambda *given, **options: save(*given, **options | {"dpi": 20}))


@pytest.fixture
def pictures_are_not_drawn(few_dots, monkeypatch) -> None:
    """Write only the beginning of plots in tests of commands whose pictures have tests of their own."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", begun_picture)


class Silent:
    """An observer that counts the calls of its methods."""

    def __init__(self) -> None:
        self.announced = 0
        self.steps: list[str] = []

    def begin(self, table: str, steps: int) -> None:
        self.announced += steps

    def step(self, doing: str) -> None:
        self.steps.append(doing)


@pytest.fixture
def observer() -> Silent:
    return Silent()


@pytest.fixture
def settings() -> Settings:
    return Settings(
        case=SMALL,
        vocabularies=(20,),
        precisions=(PRECISIONS["fp32"],),
        device=torch.device("cpu"),
        runs=2,
        calls=1,
        warmups=1,
    )


@pytest.fixture
def plain_ways() -> dict[str, Way]:
    return {way.name: way for way in rivals.ways() if way.kernel is None}


@pytest.fixture
def run() -> Run:
    """The circumstances of a measurement."""
    return Run(
        date="2026-01-02T03:04:05+00:00",
        command="gatewise bench lm",
        device="NVIDIA H200",
        driver="570.1",
        python="3.12.1",
        torch="2.9.0",
        cuda="12.8",
        cudnn=91900,
        gatewise="0.1.0",
        commit="0123456789abcdef",
        dirty=False,
    )


@pytest.fixture
def row(run: Run) -> Record:
    """A measured row, from which tests derive others."""
    return Record(
        benchmark="lm",
        case="ptb_large",
        settings=dataclasses.asdict(SMALL) | {"vocabulary": 10_000},
        way="nn.LSTMCell loop",
        kernel=None,
        dtype="tf32",
        status="measured",
        note="",
        run=run,
        median=0.02,
        q20=0.019,
        q80=0.023,
        runs=20,
        words_per_second=35_000.0,
        peak_bytes=3 << 30,
        error=1e-4,
        allowed=2e-3,
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat\nand the dog sat on the log\n" * 20, encoding="utf-8")
    return path

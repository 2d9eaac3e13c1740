from __future__ import annotations

import dataclasses

import pytest
import torch

from gatewise.benchmarks.curve import Rival
from gatewise.benchmarks.nmt import agreement, curve
from gatewise.benchmarks.nmt.cases import TINY_CASES, TranslationCase
from gatewise.benchmarks.nmt.record import TranslationRecord
from gatewise.benchmarks.nmt.table import TRANSLATION_PRECISIONS, Settings
from gatewise.benchmarks.nmt.ways import Way
from gatewise.benchmarks.precision import Precision
from gatewise.benchmarks.record import Record
from gatewise.selection.timing import Timing
from tests.pairwise import exhaustive

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def trained_rivals() -> dict[object, Rival]:
    return {}


@pytest.fixture(autouse=True)
def rivals_once(monkeypatch: pytest.MonkeyPatch, trained_rivals: dict[object, Rival]) -> None:
    """Train plain PyTorch once for all tests of a case, of which weights and batches are the same each time."""
    trained = curve.rival

    def rival(case: TranslationCase, batches, start, precision: Precision) -> Rival:
        key = case, precision.name, batches[0].source.device, agreement._MAP
        if key not in trained_rivals:
            trained_rivals[key] = trained(case, batches, start, precision)
        return trained_rivals[key]

    monkeypatch.setattr(curve, "rival", rival)


@pytest.fixture(params=[TINY_CASES[0], *exhaustive(*TINY_CASES[1:])], ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> TranslationCase:
    """The tiny cases, without dropout, whose masks would differ between ways."""
    return dataclasses.replace(request.param, dropout=0.0)


@pytest.fixture
def settings() -> Settings:
    return Settings(
        benchmark="nmt",
        cases=TINY_CASES[:1],
        precisions=(TRANSLATION_PRECISIONS["fp32"],),
        ways=(Way("plain PyTorch"), Way("reference, gatewise", "reference", "gatewise")),
        device=CPU,
        seconds=0.0,
        least=2,
        calls=1,
    )


@pytest.fixture
def plain(row: Record) -> TranslationRecord:
    """A measured row of plain PyTorch, from which tests derive others."""
    return TranslationRecord(
        benchmark="nmt",
        case="iwslt-50-50-128",
        settings=dataclasses.asdict(TINY_CASES[0]) | {"batch": 128, "source": 50, "target": 50},
        dtype="tf32",
        way="plain PyTorch",
        attention="",
        lstm="nn.LSTM",
        status="measured",
        note="loss is within.",
        run=row.run,
        times={"eager": Timing(0.05, 0.049, 0.052, 5), "graph": Timing(0.025, 0.025, 0.025, 5)},
        peak_bytes={"eager": 3_500_000_000, "graph": 3_600_000_000},
        parts={
            "attention": 2_000_000_000,
            "LSTM": 400_000_000,
            "output": 500_000_000,
            "other": 50_000_000,
            "backward": 150_000_000,
            "weights": 400_000_000,
        },
        loss=6.0,
        seconds_to_loss={"eager": 5.0, "graph": 2.5},
        steps_to_loss={"eager": 100, "graph": 100},
        error=1e-4,
        allowed=2e-3,
    )


@pytest.fixture
def ours(plain: TranslationRecord) -> TranslationRecord:
    return dataclasses.replace(
        plain,
        way="fused, gatewise",
        attention="fused",
        lstm="gatewise",
        times={"eager": Timing(0.04, 0.04, 0.04, 5), "graph": Timing(0.008, 0.008, 0.008, 5)},
        peak_bytes={"eager": 1_000_000_000, "graph": 1_000_000_000},
        parts=plain.parts | {"attention": 50_000_000, "backward": 0},
        seconds_to_loss={"eager": 4.0, "graph": 0.8},
    )

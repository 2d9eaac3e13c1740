"""The report of the benchmark of models."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("rich")

from rich.console import Console

from gatewise.benchmarks.models import report
from gatewise.benchmarks.models.record import GRAPH, LAYERS, STEP, Measurement, ModelRecord, newest
from gatewise.benchmarks.record import Run
from gatewise.selection.timing import Timing

RUN = Run(
    date="2026-01-02T03:04:05+00:00",
    command="gatewise bench models",
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


def measured(step: float, layers: float, graph: float, *kernels: str, note: str = "") -> Measurement:
    times = {STEP: step, LAYERS: layers, GRAPH: graph}
    return Measurement(
        "measured",
        note,
        kernels=kernels,
        calls=5,
        times={what: Timing(1e-3 * value, 0.9e-3 * value, 1.1e-3 * value, 9) for what, value in times.items()},
        peak_bytes=3 << 30,
        worst=0.25,
        largest=1e-3,
    )


@pytest.fixture
def record() -> ModelRecord:
    ways = {"before": measured(200.0, 180.0, 190.0), "one line": measured(50.0, 30.0, 40.0, "persistent")}
    settings = {"batch": 64, "precision": "float16 autocast"}
    return ModelRecord("models", "bonito-sup", "bonito", settings, "train", RUN, ways)


def test_speed_ups_and_shares(record: ModelRecord) -> None:
    assert record.speed_up("one line", STEP) == pytest.approx(4.0)
    assert record.speed_up("one line", LAYERS) == pytest.approx(6.0)
    assert record.speed_up("reverse=", STEP) is None
    assert record.ways["before"].share == pytest.approx(0.9)


def test_the_table_of_a_page(record: ModelRecord) -> None:
    text = report.markdown([record])
    assert "| bonito-sup, float16 autocast | before | 200 | 180 | 90 % | 190 | 0.25 | 3 GiB |  |" in text
    assert "|  | one line | 50 (4.0x) | 30 (6.0x) | 60 % | 40 (4.8x) | 0.25 | 3 GiB | persistent |" in text
    other = dataclasses.replace(
        record, case="tts", ways=record.ways | {"one line": measured(100.0, 90.0, 1.0, "persistent")}
    )
    found = "one line makes the LSTM layers 2.0 (tts) to 6.0 times (bonito-sup) and the whole step 2.0 (tts) to 4.0"
    assert found in report.markdown([record, other])


def test_what_was_not_measured_is_said(record: ModelRecord) -> None:
    ways = record.ways | {
        "before": measured(2.0, 1.0, 0.5, note="No CUDA graph: packed."),
        "one line": Measurement("wrong", "around step 25 the loss is 3"),
    }
    record = dataclasses.replace(record, ways=ways)
    assert record.status == "wrong"
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(report.on_screen([record]))
    shown = " ".join(console.export_text().split())
    assert "wrong: around step 25 the loss is 3 (bonito-sup one line)" in shown
    assert "No CUDA graph: packed. (bonito-sup before)" in shown
    assert "| bonito-sup | one line |  |  |  | 0 |  |" in report.report([record])


def test_nothing_was_measured() -> None:
    console = Console(record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(report.on_screen([]))
    assert "No row was finished." in console.export_text()


def test_the_newest_record_of_each_model_counts(record: ModelRecord) -> None:
    newer = dataclasses.replace(record, run=dataclasses.replace(RUN, date="2026-02-02T03:04:05+00:00"))
    inference = dataclasses.replace(record, direction="inference")
    assert newest([record, inference, newer]) == [newer, inference]

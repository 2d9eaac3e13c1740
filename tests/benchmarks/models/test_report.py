"""The report of the benchmark of models."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
from torch import nn

pytest.importorskip("rich")

from rich.console import Console

from gatewise.benchmarks.models import report
from gatewise.benchmarks.models.cases import TINY_CASES
from gatewise.benchmarks.models.hydrology import Hydrology
from gatewise.benchmarks.models.record import GRAPH, LAYERS, STEP, Measurement, ModelRecord, newest
from gatewise.benchmarks.record import Run
from gatewise.contract.errors import ArgumentError
from gatewise.selection.timing import Timing


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
def record(run: Run) -> ModelRecord:
    ways = {"before": measured(200.0, 180.0, 190.0), "one line": measured(50.0, 30.0, 40.0, "persistent")}
    settings = {"batch": 64, "precision": "float16 autocast"}
    return ModelRecord("models", "bonito-sup", "bonito", settings, "train", run, ways)


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
        "before": measured(2.0, 1.0, 0.5, note="No CUDA graph: packed"),
        "one line": Measurement("wrong", "around step 25 the loss is 3"),
    }
    record = dataclasses.replace(record, ways=ways)
    assert record.status == "wrong"
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(report.on_screen([record]))
    shown = " ".join(console.export_text().split())
    assert "wrong: around step 25 the loss is 3 (bonito-sup one line)" in shown
    assert "No CUDA graph: packed (bonito-sup before)" in shown
    assert "| bonito-sup | one line |  |  |  | 0 |  |" in report.report([record])


def test_nothing_was_measured() -> None:
    console = Console(record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(report.on_screen([]))
    assert "No row was finished." in console.export_text()


def test_the_newest_record_of_each_model_counts(record: ModelRecord) -> None:
    record = dataclasses.replace(record, case=TINY_CASES[0].name, settings=TINY_CASES[0].settings)
    newer = dataclasses.replace(record, run=dataclasses.replace(record.run, date="2026-02-02T03:04:05+00:00"))
    inference = dataclasses.replace(record, direction="inference")
    assert newest([record, inference, newer], TINY_CASES) == [newer, inference]


def test_a_record_of_a_model_that_was_changed_since_does_not_count(record: ModelRecord) -> None:
    changed, kept, *_ = TINY_CASES
    records = [dataclasses.replace(record, case=case.name, settings=case.settings) for case in (changed, kept)]
    changed = dataclasses.replace(changed, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    assert newest(records, (changed, kept)) == records[1:]
    assert newest(records, (kept,)) == records[1:]
    message = "`--results` must be records of the models as they are now, got older ones only. Run `gatewise bench mod"
    with pytest.raises(ArgumentError, match=message):
        newest(records, (changed,))


def test_the_settings_tell_models_apart() -> None:
    flood = TINY_CASES[0]
    assert {"optimizer": "Adam(lr=0.001)", "parameters": 16_477, "hidden_size": 16}.items() <= flood.settings.items()
    for change in (
        {"optimizer": functools.partial(torch.optim.Adam, lr=0.1)},
        {"program": dataclasses.replace(flood.program, static=4)},
        {"program": Narrowed(**dataclasses.asdict(flood.program))},
        {"clip_norm": 2.0},
    ):
        assert dataclasses.replace(flood, **change).settings != flood.settings
    for case in TINY_CASES:
        assert json.loads(json.dumps(case.settings)) == case.settings


class Narrowed(Hydrology):
    """The same sizes for another model."""

    def build(self, adapted: bool) -> nn.Module:
        return nn.LSTM(self.dynamic, self.hidden_size)

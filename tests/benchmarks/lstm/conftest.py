from __future__ import annotations

import dataclasses

import pytest
import torch

from gatewise.benchmarks.cases import LSTM_TINY, LSTMCase
from gatewise.benchmarks.lstm.floor import Floor
from gatewise.benchmarks.lstm.grid import Settings
from gatewise.benchmarks.lstm.record import LayerRecord
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.benchmarks.record import Record
from gatewise.selection.timing import Timing


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.95 * seconds, 1.1 * seconds, 20)


@pytest.fixture
def cell(row: Record) -> LayerRecord:
    """A measured row, from which tests derive others: 4x eager, 2x under a graph, twice the floor."""
    case = LSTMCase("speech", 500, 32, 256)
    return LayerRecord(
        benchmark="lstm",
        case=case.name,
        settings=dataclasses.asdict(case) | {"tokens": 16_000},
        dtype="bf16",
        direction="train",
        kernel="auto",
        status="measured",
        note="y is 1.0e-03 from float64, within the allowed 2.0e-02.",
        run=row.run,
        ran="persistent",
        reason="least predicted time",
        algorithm="forward: 8 units",
        predicted=1.1e-3,
        predicted_bytes=1 << 20,
        times={
            "eager": {"gatewise": timing(1.5e-3), "nn.LSTM": timing(6e-3)},
            "graph": {"gatewise": timing(1e-3), "nn.LSTM": timing(2e-3)},
        },
        floor=Floor(4e-4, 1e-4),
        peak_bytes={"gatewise": 30 << 20, "nn.LSTM": 50 << 20},
        owned_bytes={"gatewise": 10 << 20, "nn.LSTM": 10 << 20},
        errors={"y": {"gatewise": 1e-3, "nn.LSTM": 1e-3}},
        error_ratio=1.04,
    )


@pytest.fixture
def tiny() -> Settings:
    return Settings(
        benchmark="lstm_quick",
        cases=LSTM_TINY[:1],
        precisions=(LAYER_PRECISIONS["fp32"],),
        directions=("train",),
        kernels=("auto",),
        device=torch.device("cpu"),
        seconds=0.0,
        least=2,
        most=4,
        warmups=1,
        sample=0.0,
    )

from __future__ import annotations

import functools

import pytest
import torch

from gatewise.benchmarks.cells.cases import TINY, chosen_cells
from gatewise.benchmarks.cells.record import CELL, LIBRARY, LOOP, PLAIN, RESETS, STEP, CellRecord, Measurement
from gatewise.benchmarks.cells.run import Settings
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.benchmarks.record import Record
from gatewise.benchmarks.sampling import Sampling
from gatewise.selection.timing import Timing


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.compile` trace functions and call what it traced, without generating code, which takes long."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def tiny() -> Settings:
    return Settings(
        benchmark="cells_quick",
        cells=chosen_cells(["gru"]),
        cases=TINY[:1],
        precisions=(LAYER_PRECISIONS["fp32"],),
        directions=("train",),
        sampling=Sampling(torch.device("cpu"), 0.0, least=2, most=4, warmups=1, sample=0.0),
        ways=(RESETS, PLAIN, LIBRARY, LOOP),
    )


def _times(eager: float, graph: float) -> dict[str, Timing]:
    return {
        how: Timing(seconds, 0.95 * seconds, 1.1 * seconds, 20) for how, seconds in (("eager", eager), ("graph", graph))
    }


@pytest.fixture
def cell(row: Record) -> CellRecord:
    """A measured row, from which tests derive others."""
    own = {"peak_bytes": 30 << 20, "owned_bytes": 10 << 20, "errors": {"y": 1e-3}}
    return CellRecord(
        benchmark="cells",
        cell="gru",
        case="100-64-512",
        settings={"name": "100-64-512", "time": 100, "batch": 64, "hidden_size": 512},
        dtype="bf16",
        direction="train",
        run=row.run,
        ways={
            LOOP: Measurement("measured", times=_times(4e-2, 8e-3), **own | {"peak_bytes": 90 << 20}),
            CELL: Measurement(
                "measured",
                "y is 1.0e-03 from float64, within the allowed 2.0e-02.",
                ran="persistent",
                ran_captured="persistent",
                times=_times(1e-3, 5e-4),
                error_ratio=1.04,
                **own,
            ),
            RESETS: Measurement("measured", ran="stepwise", times=_times(1.1e-3, 5.1e-4), error_ratio=1.0, **own),
            STEP: Measurement("measured", times=_times(5e-2, 4e-3), **own),
            LIBRARY: Measurement("measured", times=_times(4e-3, 1.5e-3), **own),
            PLAIN: Measurement("measured", times=_times(9e-4, 4e-4), **own),
        },
    )

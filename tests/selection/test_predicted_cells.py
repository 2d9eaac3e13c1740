"""Predicted times of cells with their own parameters, states and statistics, beside those that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gatewise.cells import SLSTM, LayerNormGRU, LayerNormLSTM, PeepholeLSTM
from gatewise.contract.device import Device
from gatewise.contract.problem import Problem
from gatewise.selection.predict import predicted

CELLS = {cell.name: cell for cell in (LayerNormLSTM(), LayerNormGRU(), PeepholeLSTM(), SLSTM())}
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "cells.jsonl"


def measured(kernel: str) -> list[tuple[str, str, float]]:
    """Return cell, case and seconds of the newest training steps in bfloat16 that a kernel ran in a CUDA graph."""
    found = {}
    for line in RECORD.read_text().splitlines():
        row = json.loads(line)
        own = row["ways"].get("gatewise", {})
        about = row["dtype"], row["direction"], own.get("ran_captured"), row["run"]["device"]
        wanted = about == ("bf16", "train", kernel, "NVIDIA H200")
        if wanted and row["cell"] in CELLS and row["case"][0].isdigit() and "graph" in own["times"]:
            found[row["cell"], row["case"]] = own["times"]["graph"]["median"]
    return [(*key, seconds) for key, seconds in found.items()]


@pytest.mark.parametrize("kernel", ["persistent", "stepwise"])
def test_predictions_are_near_measured_times(kernel: str) -> None:
    rows, device = measured(kernel), Device.named("h200")
    assert len(rows) >= 20
    for name, case, seconds in rows:
        time, batch, hidden = map(int, case.split("-"))
        problem = Problem(
            time,
            batch,
            hidden,
            hidden,
            cell=CELLS[name],
            bias="norm" not in name,
            dtype=torch.bfloat16,
            needs_grad=True,
            captured=True,
            announced=True,
        )
        (found,) = [each.seconds for each in predicted(problem, device).verdicts if each.kernel == kernel]
        assert found is not None
        assert 0.68 < found / seconds < 1.4, (name, case)

"""The choice in a CUDA graph, held to what every kernel that may be the fastest took on an H200.

`measured.jsonl` has the shapes of `gatewise bench lstm`: microseconds of a call replayed as a graph, medians of a few
samples taken in turn (PyTorch 2.11, CUDA 13.0, cuDNN 9.19).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from gatewise.benchmarks.cases import LSTM_GRID
from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.selection import predicted

H200 = Device.named("h200")
CASES = {case.name: case for case in LSTM_GRID}
CELLS = [json.loads(line) for line in Path(__file__).with_name("measured.jsonl").read_text().splitlines()]


def problem_of(cell: dict) -> Problem:
    case, precision = CASES[cell["case"]], LAYER_PRECISIONS[cell["dtype"]]
    return Problem(
        time=case.time,
        batch=case.batch,
        input_size=case.hidden_size,
        hidden_size=case.hidden_size,
        num_layers=case.num_layers,
        bidirectional=case.directions == 2,
        dtype=precision.dtype,
        layout=Layout.DEVICE_LENGTHS if case.ragged else Layout.DENSE,
        needs_grad=cell["direction"] == "train",
        allow_tf32=precision.tf32 and precision.dtype == torch.float32,
        captured=True,
        announced=True,
    )


def test_the_choice_is_within_five_percent_of_the_fastest() -> None:
    slower = []
    for cell in CELLS:
        chosen, times = predicted(problem_of(cell), H200).chosen, cell["microseconds"]
        if chosen not in times or times[chosen] > 1.05 * min(times.values()):
            slower.append((cell["dtype"], cell["direction"], cell["case"], chosen, times))
    assert len(CELLS) > 50
    assert not slower


def test_predictions_are_within_a_quarter() -> None:
    far = []
    for cell in CELLS:
        decision, times = predicted(problem_of(cell), H200), cell["microseconds"]
        ratio = (decision.verdict(decision.chosen or "").seconds or 0) * 1e6 / times.get(decision.chosen, 1e-9)
        if not 0.75 <= ratio <= 1.25:
            far.append((cell["dtype"], cell["direction"], cell["case"], decision.chosen, round(ratio, 2)))
    assert len(far) <= 0.1 * len(CELLS), far

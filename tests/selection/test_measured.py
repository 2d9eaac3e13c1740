"""The choice in a CUDA graph, held to what the kernels that may be the fastest took on an H200.

A line of `measured.jsonl` is a problem and the microseconds of a call replayed as a graph, by kernel: medians of a few
samples taken in turn (PyTorch 2.11, CUDA 13.0, cuDNN 9.19). Its shapes are those of `gatewise bench lstm`, and around
those where cuDNN's persistent algorithms are the fastest. Times of `persistent` in the benchmark's shapes are of its
records at commit 52b6119, made after the factors in the kernels' statements were fitted; they are fitted to the others.
"""

import json
from pathlib import Path

import pytest
import torch

from gatewise.benchmarks.precision import LAYER_PRECISIONS
from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.selection import predicted

H200 = Device.named("h200")
MEASURED = [json.loads(line) for line in Path(__file__).with_name("measured.jsonl").read_text().splitlines()]


def problem_of(cell):
    time, batch, hidden_size, layers, directions = cell["sizes"]
    precision = LAYER_PRECISIONS[cell["precision"]]
    return Problem(
        time,
        batch,
        hidden_size,
        hidden_size,
        num_layers=layers,
        bidirectional=directions == 2,
        dtype=precision.dtype,
        layout=Layout.DEVICE_LENGTHS if cell["ragged"] else Layout.DENSE,
        needs_grad=cell["training"],
        allow_tf32=precision.tf32 and precision.dtype == torch.float32,
        captured=True,
        announced=True,
    )


CELLS = [(problem_of(cell), cell["microseconds"]) for cell in MEASURED]


@pytest.mark.parametrize(("problem", "measured"), [cell for cell in CELLS if len(cell[1]) > 1], ids=str)
def test_the_choice_is_within_five_percent_of_the_fastest(problem, measured):
    chosen = predicted(problem, H200).chosen
    assert chosen in measured, f"{chosen} is chosen, and has no time in measured.jsonl"
    assert measured[chosen] <= 1.05 * min(measured.values())


def ratio(problem, kernel, microseconds):
    return predicted(problem, H200).verdict(kernel).seconds * 1e6 / microseconds


def test_what_is_chosen_takes_what_was_predicted_within_a_quarter():
    ratios = [
        (ratio(problem, chosen, measured[chosen]), chosen, str(problem))
        for problem, measured in CELLS
        if (chosen := predicted(problem, H200).chosen) in measured
    ]
    assert len(ratios) > 200
    far = [found for found in ratios if not 0.75 <= found[0] <= 1.25]
    assert len(far) <= 0.01 * len(ratios), far


def test_no_kernel_takes_less_than_half_or_more_than_twice_of_what_was_predicted():
    ratios = [
        (ratio(problem, kernel, microseconds), kernel, str(problem))
        for problem, measured in CELLS
        for kernel, microseconds in measured.items()
    ]
    far = [found for found in ratios if not 0.5 <= found[0] <= 2.0]
    assert not far

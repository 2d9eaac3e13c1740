"""Measures packed batches on this CPU, and prints the weights by which `aten` chooses how to compute them.

    OMP_NUM_THREADS=1 python benchmarks/packed_runs.py > gatewise/selection/rates/rankings/cpu.jsonl

Both ways, PyTorch's operator and the runs of `gatewise.kernels.aten.runs`, are timed in turn for random shapes. The
weights are those non-negative ones whose estimates have the least squared relative errors.
"""

from __future__ import annotations

import json
import platform
import random
import time
from collections.abc import Callable

import numpy as np
import torch

from gatewise.contract.device import Device
from gatewise.contract.problem import Layout, Problem
from gatewise.contract.pytorch import LAYERS
from gatewise.contract.saved import Inputs
from gatewise.kernels import operators
from gatewise.kernels.aten import onednn, runs

_SHAPES = 60
_LEAST_SECONDS = 0.15
_WAYS = {"packed": operators.call, "runs": runs.call}


def main() -> None:
    """Measure all cells and print one ranking for each."""
    device, generator = Device.probe("cpu"), random.Random(1)
    for layer in LAYERS[:3]:
        weights = {}
        for mode in ("inference", "training"):
            rows = {way: ([], []) for way in _WAYS}
            for _ in range(_SHAPES):
                problem, sizes = _drawn(layer.cell, generator, training=mode == "training")
                counted = runs.quantities(problem, sizes, by_onednn=_by_onednn(problem, device))
                for way, seconds in _times(problem, sizes).items():
                    rows[way][0].append(counted[way])
                    rows[way][1].append(seconds)
            for way, (quantities, seconds) in rows.items():
                names = list(quantities[0])
                found = _fitted(np.array([[row[name] for name in names] for row in quantities]), np.array(seconds))
                counted = {name for name in names if any(row[name] for row in rows[way][0])}
                weights |= {
                    f"{mode} {way} {name}": value for name, value in zip(names, found, strict=True) if name in counted
                }
        print(
            json.dumps(
                {
                    "ranking": f"aten packed {layer.name.lower()}",
                    "device": platform.processor() or platform.machine(),
                    "unit": "microseconds for each unit of a quantity of one direction of a layer, with one thread",
                    "record": f"benchmarks/packed_runs.py, PyTorch {torch.__version__}, {_SHAPES} shapes a mode",
                    "weights": weights,
                }
            ),
            flush=True,
        )


def _drawn(cell, generator: random.Random, *, training: bool) -> tuple[Problem, list[int]]:  # noqa: ANN001
    steps = round(2 ** generator.uniform(1, 7.7))
    batch = round(2 ** generator.uniform(1, 6))
    hidden = generator.choice((8, 16, 32, 64, 128, 256, 512))
    if steps * batch * hidden * hidden > 2**27:
        hidden = min(hidden, 64)
    shortest = generator.choice((1, max(1, steps // 2), max(1, steps - 3)))
    lengths = [steps, shortest, *(generator.randint(shortest, steps) for _ in range(batch - 2))]
    sizes = [sum(length > step for length in lengths) for step in range(steps)]
    problem = Problem(steps, batch, hidden, hidden, cell=cell, layout=Layout.PACKED, needs_grad=training)
    return problem, sizes


def _by_onednn(problem: Problem, device: Device) -> bool:
    return onednn.takes(problem.replace(layout=Layout.DENSE), device)


def _times(problem: Problem, sizes: list[int]) -> dict[str, float]:
    """Return the least microseconds of each way."""
    size, rows = problem.hidden_size, problem.gate_rows
    drawn = [
        torch.randn(sum(sizes), size),
        torch.randn(1, sizes[0], size),
        torch.randn(1, sizes[0], problem.states_size),
    ]
    drawn += [torch.randn(*shape) / size**0.5 for shape in ((rows, size), (rows, size), (rows,), (rows,))]
    x, h0, c0, *weights = [tensor.requires_grad_(problem.needs_grad) for tensor in drawn]
    inputs = Inputs(x, h0, c0, tuple(weights), None, torch.tensor(sizes))
    above = torch.randn(sum(sizes), size)

    def run(call: Callable) -> None:
        y = call(problem, inputs).y
        if problem.needs_grad:
            y.backward(above)

    samples: dict[str, list[float]] = {way: [] for way in _WAYS}
    begun = time.perf_counter()
    while time.perf_counter() - begun < _LEAST_SECONDS or len(samples["packed"]) < 4:
        for way, call in _WAYS.items():
            start = time.thread_time()
            run(call)
            samples[way].append((time.thread_time() - start) * 1e6)
    return {way: min(times) for way, times in samples.items()}


def _fitted(quantities: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the non-negative weights of the least squared relative errors, by coordinate descent."""
    scale = quantities.max(0).clip(min=1)
    rows, found = quantities / scale / seconds[:, None], np.zeros(quantities.shape[1])
    left, squares = np.ones(len(seconds)), (rows**2).sum(0)
    for _ in range(20_000):
        for place in range(len(found)):
            if squares[place]:
                value = max(0.0, found[place] + rows[:, place] @ left / squares[place])
                left -= rows[:, place] * (value - found[place])
                found[place] = value
    return [float(f"{value:.4g}") for value in found / scale]


if __name__ == "__main__":
    main()

"""How far predictions are off on a GPU without measured calls: those of an H100 by the calls that an H200 measured.

    python -m benchmarks.other_gpus --into benchmarks/results/other_gpus.jsonl

Nothing is measured: the packaged calls of both devices are compared, and no GPU is needed. The error of estimates is
fitted to the calls of the first device alone, and applied to estimates of calls on the second one. Each row of the
record is a kernel and a pass: the number of calls of the second device, and the share of them whose estimate and whose
prediction is within 25 % of the measured time, replayed as a CUDA graph and called from Python.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from gatewise.contract.device import Device
from gatewise.selection import correction, points
from gatewise.selection.estimate import estimated, issue

KERNELS = "persistent", "stepwise", "cudnn", "aten", "eager"
CLOSE = 0.25


def main() -> None:
    """Print a row for each kernel and pass, and append it to a record if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", default="h200", help="the device whose measured calls are used")
    parser.add_argument("--other", default="h100", help="the device whose calls are predicted")
    parser.add_argument("--into", type=Path, help="the file that rows are appended to")
    given = parser.parse_args()
    known, other = (Device.named(name).name for name in (given.known, given.other))
    for training in (True, False):
        for kernel in KERNELS:
            line = json.dumps(row(kernel, training, known, other))
            print(line, flush=True)
            if given.into:
                with given.into.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


def row(kernel: str, training: bool, known: str, other: str) -> dict[str, Any]:
    """Return the row of a kernel and a pass.

    Args:
        kernel: The name of the kernel.
        training: Whether the calls compute gradients.
        known: The name of the device whose measured calls are used.
        other: The name of the device whose calls are predicted.
    """
    fit = correction.fit(kernel, training, known, alone=True)
    assert fit is not None
    graph: list[tuple[float, float]] = []  # the estimate and the prediction over the measured time
    called: list[tuple[float, float]] = []
    for point in points.points(other):
        if point.kernel != kernel or point.problem.needs_grad != training:
            continue
        device, work = point.record.device, point.work
        factors = correction.factors_of(fit, work, point.problem)
        busy, issued = estimated(work, point.problem, device), issue(work, device)
        graph.append((busy / point.graph, busy * factors.busy / point.graph))
        if point.eager:
            predicted = max(busy * factors.busy, issued * factors.issue)
            called.append((max(busy, issued) / point.eager, predicted / point.eager))
    return {
        "benchmark": "other_gpus",
        "known": known,
        "other": other,
        "kernel": kernel,
        "pass": "training" if training else "inference",
        "CUDA graph": _shares(graph),
        "called from Python": _shares(called),
    }


def _shares(ratios: list[tuple[float, float]]) -> dict[str, float | int]:
    every = np.array(ratios)
    estimate, prediction = (np.abs(every - 1) < CLOSE).mean(0)
    return {"calls": len(every), "estimate": round(float(estimate), 3), "prediction": round(float(prediction), 3)}


if __name__ == "__main__":
    main()
